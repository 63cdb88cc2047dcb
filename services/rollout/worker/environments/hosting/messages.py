"""Messages between a worker and a hosted environment: JSON, the same over a pipe and over HTTP.

Each request has one reply, with the same `number`. While an environment works on `reset` or `step` it may ask for a
verdict: its reply is then `grade`, and the next request brings the verdict. So an environment needs no address but the
worker's.

Invariant: decoded messages are complete and within bounds; unknown fields, wrong types and sizes raise
`EnvironmentFailedError`.
"""

import dataclasses
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from penstock.environments import AssistantTurn, Observation, StepResult
from penstock.environments.protocol import TaskRow
from penstock.errors import EnvironmentFailedError, InvalidRequestError, PenstockError, UnavailableError
from penstock.records import Message, TextPart, Verdict

MAX_MESSAGE_BYTES = 48 * 2**20
"""Maximum size of any request or reply. It holds images as base64, which takes a third more."""
MAX_IMAGES_BYTES = 32 * 2**20
"""Maximum size of all images of one observation."""
MAX_TEXT_CHARS = 2 * 2**20
"""Maximum characters of one observation: far more than any model's context."""
_MAX_METRICS = 256
_MAX_ERROR_CHARS = 4000

Meaning: TypeAlias = Literal["", "unavailable", "invalid"]


class ObservationTooLargeError(EnvironmentFailedError):
    """An observation is larger than any message may carry; the text names the size and the bound."""


class EnvironmentUnavailableError(EnvironmentFailedError):
    """An environment could not begin because of an error of the operating system or the network; it may later."""


class _Wire(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages."""


class TaskMessage(_Wire, frozen=True, kw_only=True):
    """A task without its access to the reward service. Images are base64, here and everywhere."""

    id: str
    seed: int
    messages: tuple[Message, ...]
    images: tuple[bytes, ...] = ()
    golds: tuple[str, ...] = ()
    profile: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    max_turns: int | None = None

    @classmethod
    def of(cls, task: TaskRow) -> "TaskMessage":
        """Take the data of `task`."""
        return cls(**{name: getattr(task, name) for name in cls.__struct_fields__})

    def fields(self) -> dict[str, Any]:
        """Return the arguments of a `Task`."""
        return {name: getattr(self, name) for name in self.__struct_fields__}


class Request(_Wire, frozen=True, kw_only=True, tag_field="kind"):
    """A message from the worker."""

    number: int
    """Number of the episode's request, from 0; the reply repeats it."""
    remaining_s: float | None
    """Seconds that the episode has left; None for no limit. The worker waits no longer for the reply."""


class ResetRequest(Request, frozen=True, kw_only=True, tag="reset"):
    """Begin an episode."""

    environment: str
    """Name of the environment at a server that has several."""
    task: TaskMessage


class StepRequest(Request, frozen=True, kw_only=True, tag="step"):
    """Answer a turn of the policy."""

    turn: AssistantTurn


class VerdictRequest(Request, frozen=True, kw_only=True, tag="verdict"):
    """Answers `grade`."""

    verdict: Verdict | None = None
    """None if there is no verdict."""
    error: str = ""
    """Why there is no verdict; empty if there is one."""


class CloseRequest(Request, frozen=True, kw_only=True, tag="close"):
    """End the episode. Over HTTP this is DELETE."""


class ObservationMessage(_Wire, frozen=True, kw_only=True):
    """The messages, images and tools that the policy sees next."""

    messages: tuple[Message, ...]
    images: tuple[bytes, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


class Reply(_Wire, frozen=True, kw_only=True, tag_field="kind"):
    """A message from the environment."""

    number: int
    """The request's number."""


class ObservationReply(Reply, frozen=True, kw_only=True, tag="observation"):
    """Answers `reset`."""

    observation: ObservationMessage


class ResultReply(Reply, frozen=True, kw_only=True, tag="result"):
    """Answers `step`."""

    observation: ObservationMessage | None
    truncated: bool = False
    reward: float | None = None
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    step_kind: str = ""
    """`StepResult.kind`."""


class GradeReply(Reply, frozen=True, kw_only=True, tag="grade"):
    """Answers `reset`, `step` or `verdict` with a text to judge."""

    text: str


class FailedReply(Reply, frozen=True, kw_only=True, tag="failed", omit_defaults=True):
    """Answers any request: the environment raised an error, and the episode is over."""

    error: str
    is_too_large: bool = False
    """Whether it is over because an observation is too large. The sample is then cut short, as by a budget."""
    meaning: Meaning = ""
    """What an error of `reset` means for the group. unavailable: it may be played later. invalid: never. Empty: the
    environment is at fault."""


class ClosedReply(Reply, frozen=True, kw_only=True, tag="closed"):
    """Answers `close`."""


AnyRequest: TypeAlias = ResetRequest | StepRequest | VerdictRequest | CloseRequest
AnyReply: TypeAlias = ObservationReply | ResultReply | GradeReply | FailedReply | ClosedReply
_MessageT = TypeVar("_MessageT", bound=_Wire)


def encode(message: AnyRequest | AnyReply) -> bytes:
    """Encode the message as JSON.

    Raises:
        EnvironmentFailedError: it is larger than any message may be, or holds what JSON cannot.
    """
    try:
        data = msgspec.json.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise EnvironmentFailedError(f"a message cannot be sent: {error}") from None
    if len(data) > MAX_MESSAGE_BYTES:
        raise EnvironmentFailedError(too_large(len(data)))
    return data


def encode_or_fail(reply: AnyReply) -> tuple[AnyReply, bytes]:
    """Encode a reply; return what is sent, too: a reply that says why, in place of one that cannot be sent."""
    try:
        return reply, encode(reply)
    except EnvironmentFailedError as error:
        failure = failed(reply.number, str(error))
        return failure, encode(failure)


def renumber(data: bytes, number: int) -> bytes:
    """Return an encoded reply with the number of the request that it answers; after questions that is a later one."""
    return msgspec.json.encode(msgspec.json.decode(data, type=dict[str, msgspec.Raw]) | {"number": number})


def decode_request(data: bytes) -> AnyRequest:
    """Decode a request that `encode` encoded.

    Raises:
        EnvironmentFailedError: it is not a request.
    """
    return _decode(_REQUESTS, data)


def decode_reply(data: bytes) -> AnyReply:
    """Decode a reply that `encode` encoded.

    Raises:
        EnvironmentFailedError: it is not a reply.
    """
    return _decode(_REPLIES, data)


def too_large(size_bytes: int) -> str:
    """Return the error text for a message of this size."""
    return f"a message of {size_bytes} bytes; at most {MAX_MESSAGE_BYTES} are taken; send smaller images"


def failed(number: int, error: str, *, is_too_large: bool = False, meaning: Meaning = "") -> FailedReply:
    """Return a reply that reports the error, with the middle of a long text cut out."""
    half = _MAX_ERROR_CHARS // 2
    text = error if len(error) <= _MAX_ERROR_CHARS else f"{error[:half]} ... {error[-half:]}"
    sendable = text.encode(errors="replace").decode()
    return FailedReply(number=number, error=sendable, is_too_large=is_too_large, meaning=meaning)


def numbered(reply: AnyReply, number: int) -> AnyReply:
    """Return the reply with the number of the request that it answers; after questions that is a later one."""
    return msgspec.structs.replace(reply, number=number)


def reset_failed(number: int, error: BaseException, described: str) -> FailedReply:
    """Return a reply that reports what `reset` raised, with what it means for the group."""
    match error:
        case InvalidRequestError():
            return failed(number, str(error), meaning="invalid")
        case OSError() | UnavailableError() | EnvironmentUnavailableError():
            return failed(number, described, meaning="unavailable")
    return failed(number, described)


def error_of(reply: FailedReply) -> PenstockError:
    """Return the error that `reply` reports."""
    if reply.is_too_large:
        return ObservationTooLargeError(reply.error)
    match reply.meaning:
        case "unavailable":
            return EnvironmentUnavailableError(reply.error)
        case "invalid":
            return InvalidRequestError(reply.error)
    return EnvironmentFailedError(reply.error)


def to_step(turn: AssistantTurn, *, number: int, remaining_s: float | None) -> StepRequest:
    """Return the request for `turn`. A call whose arguments JSON cannot carry (the policy may say anything) becomes a
    malformed call."""
    calls, malformed = [], list(turn.malformed_calls)
    for call in turn.calls:
        try:
            msgspec.json.decode(msgspec.json.encode(call))
            calls.append(call)
        except (ValueError, OverflowError, RecursionError):
            malformed.append(f"{call.name}: arguments that cannot be sent as JSON".encode(errors="replace").decode())
    sendable = dataclasses.replace(turn, calls=tuple(calls), malformed_calls=tuple(malformed))
    return StepRequest(number=number, remaining_s=remaining_s, turn=sendable)


def from_observation(observation: Observation) -> ObservationMessage:
    """Encode an observation.

    Raises:
        EnvironmentFailedError: it is not an observation.
        ObservationTooLargeError: it is too large.
    """
    if not isinstance(observation, Observation):
        raise EnvironmentFailedError(
            f"it answered {type(observation).__name__}; it must answer a penstock.environments.Observation"
        )
    _check_size(observation)
    return ObservationMessage(
        messages=tuple(observation.messages),
        images=tuple(observation.images),
        tools=tuple(dict(tool) for tool in observation.tools),
    )


def to_observation(message: ObservationMessage) -> Observation:
    """Decode an observation.

    Raises:
        EnvironmentFailedError: it contradicts itself.
        ObservationTooLargeError: it is too large.
    """
    try:
        observation = Observation(messages=message.messages, images=message.images, tools=message.tools)
    except ValueError as error:
        raise EnvironmentFailedError(str(error)) from None
    _check_size(observation)
    return observation


def from_result(result: StepResult, *, number: int) -> ResultReply:
    """Return the reply for `result`.

    Raises:
        EnvironmentFailedError: it is not a result.
        ObservationTooLargeError: its observation is too large.
    """
    if not isinstance(result, StepResult):
        raise EnvironmentFailedError(
            f"it answered {type(result).__name__}; it must answer a penstock.environments.StepResult"
        )
    return ResultReply(
        number=number,
        observation=None if result.observation is None else from_observation(result.observation),
        truncated=bool(result.truncated),
        reward=result.reward,
        metrics=dict(result.metrics),
        step_kind=str(result.kind),
    )


def to_result(reply: ResultReply) -> StepResult:
    """Decode a result.

    Raises:
        EnvironmentFailedError: it contradicts itself.
        ObservationTooLargeError: its observation is too large.
    """
    if len(reply.metrics) > _MAX_METRICS:
        raise EnvironmentFailedError(f"it answered {len(reply.metrics)} metrics; at most {_MAX_METRICS} are taken")
    try:
        return StepResult(
            observation=None if reply.observation is None else to_observation(reply.observation),
            truncated=reply.truncated,
            reward=reply.reward,
            metrics=reply.metrics,
            kind=reply.step_kind,
        )
    except ValueError as error:
        raise EnvironmentFailedError(str(error)) from None


def _check_size(observation: Observation) -> None:
    num_bytes = sum(map(len, observation.images))
    if num_bytes > MAX_IMAGES_BYTES:
        raise ObservationTooLargeError(
            f"the images of an observation have {num_bytes} bytes; at most {MAX_IMAGES_BYTES} are taken; send fewer or "
            "smaller ones"
        )
    num_chars = sum(
        len(part.text) for message in observation.messages for part in message.parts if isinstance(part, TextPart)
    )
    if num_chars > MAX_TEXT_CHARS:
        raise ObservationTooLargeError(
            f"the text of an observation has {num_chars} characters; at most {MAX_TEXT_CHARS} are taken; shorten it"
        )


def _decode(decoder: msgspec.json.Decoder[_MessageT], data: bytes) -> _MessageT:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        shown = data if len(data) <= 200 else data[:200] + b"..."
        raise EnvironmentFailedError(f"it answered what is no message ({error}): {shown!r}") from None


_REQUESTS: msgspec.json.Decoder[AnyRequest] = msgspec.json.Decoder(AnyRequest)
_REPLIES: msgspec.json.Decoder[AnyReply] = msgspec.json.Decoder(AnyReply)
