"""Maps Penstock's errors to HTTP statuses."""

from collections.abc import Callable
from typing import Any

from penstock import errors
from penstock.http.json_body import MalformedJsonError
from penstock.runtime.text import printable

ErrorBodyMaker = Callable[[int, str], dict[str, Any]]
"""Makes the JSON body of an error from its status and message."""

RETRY_AFTER_S = 1
"""Seconds after which a client that may succeed later should retry."""

_STATUS_OF_ERROR: tuple[tuple[type[BaseException], int], ...] = (
    (MalformedJsonError, 400),
    (errors.AccessError, 503),  # another server refused this one: the caller cannot fix that
    (errors.UserError, 422),
    (errors.InvalidRequestError, 422),
    (errors.NotReadyError, 503),
    (errors.UnavailableError, 503),
    (errors.OverloadedError, 429),
    (errors.DeadlineError, 504),
    (TimeoutError, 504),
)

_CODE_OF_STATUS = {
    400: "INVALID_REQUEST",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    405: "METHOD_NOT_ALLOWED",
    413: "TOO_LARGE",
    422: "INVALID_REQUEST",
    429: "OVERLOADED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def status_of(error: BaseException) -> int:
    """Return the HTTP status of `error`; 500 if Penstock did not raise it on purpose."""
    for kind, status in _STATUS_OF_ERROR:
        if isinstance(error, kind):
            return status
    return 500


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return the JSON body of an error with this status."""
    return {"error": {"code": _CODE_OF_STATUS.get(status, f"HTTP_{status}"), "message": printable(message)}}


def headers_of(status: int) -> dict[str, str]:
    """Return the headers of an error with this status."""
    if status == 401:
        return {"WWW-Authenticate": "Bearer"}
    return {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
