"""Settings of `penstock train`, section [launch] of a recipe."""

import pydantic

from penstock.config import Config


class LaunchConfig(Config):
    """How `penstock train` keeps the processes of a run going, and how it ends them."""

    max_restarts: int = pydantic.Field(default=5, ge=0)
    """A process that dies more often than this within ten minutes ends the run."""
    stop_grace_s: float = pydantic.Field(default=15.0, ge=0)
    """When stopping, how long a process may take before it is killed. Workers stop first, then router, engines and
    reward service, then nats-server. The trainer has no limit: it finishes its step, the push and the checkpoint."""
