"""Names the process that a call is meant for, in the call's metadata.

A process may have died and another may answer at its address, while its lease has not lapsed yet.
"""

from typing import Any

import grpc.aio

from penstock.errors import UnavailableError

_KEY = "penstock-addressee"


def addressed_to(process_id: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call that only this process may answer."""
    return ((_KEY, process_id),)


def require_addressee(context: "grpc.aio.ServicerContext[Any, Any]", process_id: str) -> None:
    """Refuse a call that is meant for another process than this one. A call may name none.

    Raises:
        UnavailableError: it names another.
    """
    for key, value in context.invocation_metadata() or ():
        if key == _KEY and value != process_id:
            raise UnavailableError(f"{value!s} was replaced: {process_id} answers at its address")
