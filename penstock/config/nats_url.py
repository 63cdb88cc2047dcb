"""Reads the URL of a NATS server as nats-py does, so that all its readers find the server that nats-py connects to."""

from typing import Final
from urllib.parse import SplitResult, urlsplit

_SCHEMES: Final = ("nats", "tls")
"""nats-py knows ws and wss too, but only with aiohttp, which not every process has."""
_PORT: Final = 4222
"""That of a URL without one."""


def with_scheme(url: str) -> str:
    """Return the URL with its scheme in lower case, as nats-py wants it; without one, it has that of NATS."""
    scheme, mark, rest = url.partition("://")
    return f"{scheme.lower()}://{rest}" if mark else f"nats://{url}"


def fault_of(url: str) -> str:
    """Return why no client can connect to the server at `url`; empty if one can."""
    try:
        parts = urlsplit(with_scheme(url))
    except ValueError:
        return "it is not a URL"
    if parts.scheme not in _SCHEMES:
        return f"its scheme is neither {' nor '.join(_SCHEMES)}"
    if not _has_port(parts):
        return "its port is not a number from 1 to 65535"
    return "" if parts.hostname else "it has no host"


def address_of(url: str) -> tuple[str, int]:
    """Return host and port of the server at `url`, in which `fault_of` finds nothing."""
    parts = urlsplit(with_scheme(url))
    return parts.hostname or "", parts.port or _PORT


def _has_port(parts: SplitResult) -> bool:
    try:
        return parts.port != 0
    except ValueError:
        return False
