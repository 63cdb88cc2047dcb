"""Errors and gRPC codes: every error has one code, and comes back as an error that means the same."""

import grpc
import pytest

from penstock import errors
from penstock.rpc.status import code_of, error_of

ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.PenstockError)]


def failure(code: grpc.StatusCode, details: str | None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details, debug_error_string="")


@pytest.mark.parametrize("kind", ALL)
def test_every_error_is_in_the_tree_and_has_a_code(kind: type[errors.PenstockError]) -> None:
    """Only the base itself is INTERNAL: everything else was raised on purpose."""
    assert kind.__name__ in (errors.__doc__ or "")
    assert (code_of(kind("m")) is grpc.StatusCode.INTERNAL) == (kind is errors.PenstockError)


@pytest.mark.parametrize(
    "kind",
    [
        errors.InvalidRequestError,
        errors.PromptTooLongError,
        errors.PoisonError,
        errors.ChecksumError,
        errors.MissingImageError,
        errors.NotReadyError,
        errors.UnavailableError,
        errors.OverloadedError,
        errors.DeadlineError,
    ],
)
def test_an_error_comes_back_as_itself(kind: type[errors.PenstockError]) -> None:
    """There and back again, with the peer's name before its words."""
    back = error_of(failure(code_of(kind("full")), "full"), peer="reward service")
    assert type(back) is kind
    assert str(back) == "reward service: full"


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), RuntimeError("x"), errors.PenstockError("x")])
def test_what_was_not_raised_on_purpose_is_internal(error: Exception) -> None:
    """A bug is never mistaken for a bad request."""
    assert code_of(error) is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_every_code_becomes_an_error_with_a_message(code: grpc.StatusCode) -> None:
    """A failure without details still says what it was."""
    back = error_of(failure(code, None), peer="router")
    assert isinstance(back, errors.PenstockError)
    assert str(back) == f"router: {code.name}"


@pytest.mark.parametrize("who", ["CLIENT: Sent", "CLIENT: Received", "SERVER: Received"])
def test_a_message_that_is_too_large_is_not_sent_again(who: str) -> None:
    """gRPC gives it the code of an overload, which passes."""
    back = error_of(
        failure(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{who} message larger than max (9 vs. 4)"), peer="reward service"
    )
    assert type(back) is errors.InvalidRequestError


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN])
def test_a_servers_bug_does_not_look_like_something_to_repeat(code: grpc.StatusCode) -> None:
    """It is none of the errors that callers retry, nor one that blames the request."""
    assert type(error_of(failure(code, "boom"), peer="engine")) is errors.PenstockError
