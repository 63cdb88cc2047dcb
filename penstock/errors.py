"""The errors that Penstock raises.

    PenstockError
    ├── UserError              a person must change something; the command line prints it and exits with 2
    │   ├── ConfigError            a setting is wrong
    │   ├── DataError              a data file or a row of it is wrong
    │   ├── SetupError             the environment is wrong: a port in use, a server out of reach
    │   ├── AccessError            a server refused this process: its token is missing or wrong
    │   └── SupersededError        another process has taken over what this one held
    ├── InvalidRequestError    this request or message can never succeed
    │   ├── CorruptMessageError    bytes that do not decode to the expected record
    │   ├── TooManyPixelsError     images with too many pixels to be decoded
    │   └── PromptTooLongError     the prompt leaves no room for a token in any replica's context
    ├── EnvironmentFailedError an environment crashed, or gave an answer that none may give
    ├── PoisonError            it broke every process that handled it; never retry it
    ├── ChecksumError          bytes arrived changed; send them again
    ├── MissingImageError      an image that is named by its hash is not stored; store it and retry
    ├── NotReadyError          the state does not allow it (yet)
    │   └── SessionOverError       an agent's session was closed, or superseded by another one
    ├── UnavailableError       no process can do it now; try again
    ├── OverloadedError        a queue is full; try again later
    └── DeadlineError          it took longer than allowed

Handlers raise these; `penstock.rpc.status` maps them to gRPC codes and `penstock.bus.work_queue.work_loop` to the
outcomes of messages. Each error text names the field, the value and the remedy.
"""


class PenstockError(Exception):
    """Base of all errors that Penstock raises on purpose."""


class UserError(PenstockError):
    """A person must change something before this can work."""


class ConfigError(UserError):
    """A setting is missing, unknown or out of range."""


class DataError(UserError):
    """A data file, or a row of it, is not what it should be."""


class SetupError(UserError):
    """The environment is not what it should be: a port in use, a server out of reach, a path missing."""


class AccessError(UserError):
    """A server refused this process: its token is missing or wrong. Retrying does not help."""


class SupersededError(UserError):
    """Another process has taken over what this one held; this one must end."""


class InvalidRequestError(PenstockError):
    """A request or message that can never succeed, however often it is tried."""


class CorruptMessageError(InvalidRequestError):
    """Bytes that cannot be decoded to the record they should hold."""


class TooManyPixelsError(InvalidRequestError):
    """Images with too many pixels to be decoded."""


class PromptTooLongError(InvalidRequestError):
    """The prompt, with its images expanded, leaves no room for a single token in the context."""


class EnvironmentFailedError(PenstockError):
    """An environment crashed, raised an error in its own process or server, or gave an answer that none may give."""


class PoisonError(PenstockError):
    """A request or message that broke every process that handled it: n replicas, or n workers.

    It is never retried, because the next handler would break too. Its turn, sample or group ends, is counted, and is
    buried with this reason.
    """


class ChecksumError(PenstockError):
    """The receiver does not hold the bytes that were sent."""


class MissingImageError(PenstockError):
    """An image that a request names by its hash is not stored, or not any more. The caller stores it and retries."""


class NotReadyError(PenstockError):
    """The request is valid, but the state does not allow it."""


class SessionOverError(NotReadyError):
    """An agent's session takes no more calls: it was closed, or another session plays its sample now."""

    def __init__(self, message: str, *, is_superseded: bool = False) -> None:
        super().__init__(message)
        self.is_superseded = is_superseded


class UnavailableError(PenstockError):
    """No process can serve the request now; the same request may succeed later."""


class OverloadedError(PenstockError):
    """A bounded queue is full."""


class DeadlineError(PenstockError):
    """The operation took longer than the caller allowed."""
