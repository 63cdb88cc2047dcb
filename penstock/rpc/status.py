"""Maps Penstock's errors to gRPC codes and back; the only place that does."""

import grpc

from penstock import errors

_CODE_OF_ERROR: tuple[tuple[type[BaseException], grpc.StatusCode], ...] = (
    (errors.AccessError, grpc.StatusCode.UNAVAILABLE),  # another server refused: the caller cannot fix that
    (errors.UserError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.PromptTooLongError, grpc.StatusCode.OUT_OF_RANGE),
    (errors.InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.EnvironmentFailedError, grpc.StatusCode.UNKNOWN),
    (errors.PoisonError, grpc.StatusCode.ABORTED),
    (errors.ChecksumError, grpc.StatusCode.DATA_LOSS),
    (errors.MissingImageError, grpc.StatusCode.NOT_FOUND),
    (errors.NotReadyError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (errors.OverloadedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (TimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED),
)

_ERROR_OF_CODE: dict[grpc.StatusCode, type[errors.PenstockError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: errors.PromptTooLongError,
    grpc.StatusCode.UNIMPLEMENTED: errors.InvalidRequestError,
    grpc.StatusCode.ABORTED: errors.PoisonError,
    grpc.StatusCode.DATA_LOSS: errors.ChecksumError,
    grpc.StatusCode.NOT_FOUND: errors.MissingImageError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.NotReadyError,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.CANCELLED: errors.UnavailableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.OverloadedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineError,
    grpc.StatusCode.UNAUTHENTICATED: errors.AccessError,
}


_TOO_LARGE = "message larger than max"
"""In gRPC's own message about a request or an answer that exceeds the limit: no retry will make it smaller."""
_HINTS = (
    ("WRONG_VERSION_NUMBER", "it speaks plain text: switch TLS on there, or leave it out of [security] here"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not by one of those authorities: see security.tls_ca"),
    (
        "Hostname Verification",
        "its certificate does not name this host: make one that does, or see security.tls_server_name",
    ),
    ("Socket closed", "if it asks for TLS, or for a certificate, give the same [security] section here"),
)
"""Pairs of a phrase in gRPC's message about a failed handshake, and its meaning."""


def code_of(error: BaseException) -> grpc.StatusCode:
    """Return the gRPC code of `error`; INTERNAL for errors that were not raised on purpose."""
    for kind, code in _CODE_OF_ERROR:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


def error_of(failure: grpc.aio.AioRpcError, *, peer: str) -> errors.PenstockError:
    """Return the error that a client raises for `failure`; `peer` names the server in its message."""
    kind = _ERROR_OF_CODE.get(failure.code(), errors.PenstockError)
    details = failure.details() or failure.code().name
    if kind is errors.OverloadedError and _TOO_LARGE in details:
        kind = errors.InvalidRequestError
    return kind(f"{peer}: {details}{_hint(details)}")


def _hint(details: str) -> str:
    """Return the remedy for a failed connection, if gRPC's message does not give it."""
    if not details.startswith("failed to connect"):
        return ""
    return next((f"; {hint}" for sign, hint in _HINTS if sign in details), "")
