"""Settings of the router."""

import pydantic

from penstock.config import Config


class RouterConfig(Config):
    """How the router listens, and how long it tries."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: int = pydantic.Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    wait_for_replica_s: float = pydantic.Field(default=30.0, ge=0)
    """How long a call may wait, all in all, for a replica that can take it; then it fails with UNAVAILABLE."""
    max_tries: int = pydantic.Field(default=3, ge=1)
    """A call that so many replicas took and failed is given up: it may be what breaks them."""
    max_call_s: float = pydantic.Field(default=3600.0, gt=0)
    """Longest that a call may take; callers usually set a shorter deadline."""
    max_sessions: int = pydantic.Field(default=100_000, ge=1)
    """Sessions whose replica is remembered; the one unused for longest is forgotten first."""
    grace_s: float = pydantic.Field(default=5.0, ge=0)
    """When stopping, how long calls in progress may still take."""
