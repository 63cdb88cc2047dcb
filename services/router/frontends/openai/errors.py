"""Errors in OpenAI's form, so that its clients raise their own exception for each."""

import re
from typing import Any

from starlette.responses import JSONResponse

from penstock.errors import (
    InvalidRequestError,
    MissingImageError,
    PenstockError,
    PoisonError,
    PromptTooLongError,
    SessionOverError,
    UserError,
)
from penstock.http.status import headers_of, status_of
from penstock.runtime.text import printable

_TYPE_OF_STATUS = {401: "authentication_error", 429: "rate_limit_error"}
_CODE_OF_STATUS = {
    400: "invalid_request",
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    409: "session_superseded",
    410: "session_closed",
    413: "too_large",
    429: "overloaded",
    500: "internal",
    503: "unavailable",
    504: "deadline_exceeded",
}


_IMAGE_LOST = (
    "an image of this conversation is stored no longer, and storing it again did not help; its group is settled, or "
    "NATS loses what it stores: end this agent, or send the conversation again in a new session"
)
_PEER = re.compile(r"replica \S+ at \S+: ")
"""Matches an engine's name in its errors, which outside clients should not see."""


class ParameterError(InvalidRequestError):
    """A parameter of the request is wrong."""

    def __init__(self, param: str, message: str) -> None:
        """Create the error; `message` begins with the name of `param`, or describes the fault."""
        super().__init__(message)
        self.param = param


class TextTooLongError(ParameterError, PromptTooLongError):
    """The text cannot fit into the context."""


class UnknownModelError(ParameterError):
    """The request names a model that is not served."""


class UnknownSessionError(InvalidRequestError):
    """The URL names a session that never existed."""


class SessionLimitError(InvalidRequestError):
    """The session has used up its answers, or the conversation is over one of its limits."""


def status_for(error: BaseException) -> int:
    """Return the HTTP status that OpenAI's clients expect."""
    if isinstance(error, UnknownModelError | UnknownSessionError):
        return 404
    if isinstance(error, SessionOverError):
        return 409 if error.is_superseded else 410
    if isinstance(error, InvalidRequestError | MissingImageError | UserError | PoisonError):  # a 5xx would be retried
        return 400
    return status_of(error)


def body_of(error: BaseException) -> dict[str, Any]:
    """Return the error as JSON."""
    status = status_for(error)
    code = None
    if isinstance(error, UnknownModelError):
        code = "model_not_found"
    elif isinstance(error, PromptTooLongError):
        code = "context_length_exceeded"
    elif isinstance(error, SessionLimitError):
        code = "session_limit_reached"
    elif isinstance(error, MissingImageError):
        code = "image_lost"
    if isinstance(error, PenstockError):
        message = _IMAGE_LOST if isinstance(error, MissingImageError) else str(error)
    else:
        message = "the deadline passed" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
    return error_body(status, message, param=getattr(error, "param", None), code=code)


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error of that status as JSON."""
    kind = _TYPE_OF_STATUS.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = code or _CODE_OF_STATUS.get(status)
    return {"error": {"message": printable(_PEER.sub("", message)), "type": kind, "param": param, "code": code}}


def error_response(status: int, body: dict[str, Any]) -> JSONResponse:
    """Return the response that reports the error."""
    return JSONResponse(body, status, headers=headers_of(status))
