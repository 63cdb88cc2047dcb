"""What travels over the bus: prompts to the workers, finished groups to the trainer.

Shapes: T = tokens of a sample (prompt, the policy's own, and observations) with ONE placeholder id per image;
S = tokens that the policy itself produced (`loss_mask` true).
Every record checks itself, at construction and when decoded.
"""

from typing import Any, Literal

import msgspec
import numpy as np


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that travels: immutable, and decoded strictly."""


class TextPart(Record, frozen=True, tag="text", tag_field="type"):
    """Text inside a message."""

    text: str


class ImagePart(Record, frozen=True, tag="image", tag_field="type"):
    """An image inside a message: an index into the images that travel beside the messages."""

    index: int


class Message(Record, frozen=True):
    """One message of a conversation, in the roles that chat templates know."""

    role: Literal["system", "user", "assistant", "tool"]
    parts: tuple[TextPart | ImagePart, ...]


class Prompt(Record, frozen=True):
    """A dataset row made ready: one prompt group for a worker to play."""

    run_id: str
    index: int
    """Place in the run's order of admission, from 0; with `run_id` the identity of the group."""
    attempt: int
    """0, and one more each time the group was rejected as stale and admitted again."""
    incarnation: str
    """The start of the trainer that admitted it. A trainer that starts again puts what is outstanding back on the bus,
    which would take an id that it has seen, and perhaps removed the message of, for a repetition."""
    admitted_version: int
    """Published policy version at admission: nothing older may play it."""
    num_samples: int
    messages: tuple[Message, ...]
    images: tuple[bytes, ...]
    golds: tuple[str, ...]
    profile: str
    """The reward service's profile that judges it."""
    environment: str
    """The environment that plays it."""

    def __post_init__(self) -> None:
        if min(self.index, self.attempt, self.admitted_version) < 0 or self.num_samples < 1:
            raise ValueError("index, attempt and admitted_version must be >= 0 and num_samples >= 1")
        indices = [part.index for message in self.messages for part in message.parts if isinstance(part, ImagePart)]
        if indices != list(range(len(self.images))):
            raise ValueError(f"messages refer to images {indices}, but {len(self.images)} travel beside them")

    @property
    def group_id(self) -> str:
        """Identity of the group, the same over all attempts."""
        return group_id(self.run_id, self.index)

    @property
    def message_id(self) -> str:
        """Identity on the bus: one per admission, so that a group admitted again is not taken for a repetition."""
        return f"{self.group_id}/{self.attempt}/{self.incarnation}"


class VersionSpan(Record, frozen=True, array_like=True):
    """A run of the policy's own tokens made by one policy version."""

    num_tokens: int
    policy_version: int

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.policy_version < 0:
            raise ValueError(f"a version span needs num_tokens >= 1 and policy_version >= 0, not {self}")


UNJUDGED = frozenset({"TIMEOUT", "OUT_OF_MEMORY", "FAILED"})
"""Statuses of a response on which the verifier ran into a limit: whether it is right is not known."""


class Verdict(Record, frozen=True):
    """The reward service's judgement of a sample."""

    score: float
    """The reward; 0 and without meaning where the response was not judged."""
    status: str
    """Name of a VerdictStatus without its prefix, for example OK or NO_ANSWER."""
    extracted: str
    method: str

    @property
    def is_judged(self) -> bool:
        """Whether the score means anything."""
        return self.status not in UNJUDGED


class Sample(Record, frozen=True):
    """One completion of a prompt, over all its turns."""

    token_ids: np.ndarray
    """int32[T]"""
    loss_mask: np.ndarray
    """bool[T]: true where the policy itself produced the token."""
    logprobs: np.ndarray
    """float32[T]: the engine's logprob of each token of its own; 0 elsewhere."""
    version_spans: tuple[VersionSpan, ...]
    """Over the policy's own tokens, in order; they add up to S."""
    images: tuple[bytes, ...]
    """Images that the environment added after the prompt's; their placeholders follow the prompt's."""
    num_turns: int
    num_prompt_tokens: int
    """The last turn's prompt as the engine counted it, image placeholders expanded."""
    num_cached_tokens: int
    """Prompt tokens that the engine's prefix cache held, over all turns."""
    num_last_turn_tokens: int
    """Tokens of its own that the policy produced in the last turn."""
    finish_reason: Literal["stop", "length", "environment"]
    verdict: Verdict
    text: str
    """The policy's own text, for people and for the verdict."""

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name, dtype in (("token_ids", "<i4"), ("loss_mask", "|b1"), ("logprobs", "<f4")):
            array = getattr(self, name)
            if array.dtype.str != dtype or array.shape != (length,):
                raise ValueError(f"{name} must be {dtype}[{length}], not {array.dtype.str}{list(array.shape)}")
        own = int(self.loss_mask.sum())
        spanned = sum(span.num_tokens for span in self.version_spans)
        if spanned != own:
            raise ValueError(f"version spans cover {spanned} tokens, but the policy produced {own}")
        if own == 0:
            raise ValueError("a sample holds no token of the policy's own")
        if not np.isfinite(self.logprobs).all():
            raise ValueError("logprobs hold a value that is not finite")

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that produced one of its tokens."""
        return min(span.policy_version for span in self.version_spans)


class RecordedCall(Record, frozen=True):
    """One answer that a client of the OpenAI-compatible face got, with all that training on it needs.

    P = tokens of the prompt with one placeholder id per image.
    """

    session: str
    """What its client calls the session; calls of one session are kept in their order."""
    request_id: str
    choice: int
    """Place among the answers to one request, from 0."""
    created: float
    """When it was kept, in seconds since 1970."""
    input_ids: np.ndarray
    """int32[P]"""
    images: tuple[bytes, ...]
    output_ids: np.ndarray
    """int32[S]: all that the policy sampled, the end token or the one that completed a stop string included."""
    logprobs: np.ndarray
    """float32[S]: ln of the probability with which each was drawn, tempered."""
    version_spans: tuple[VersionSpan, ...]
    """They add up to S."""
    finish_reason: Literal["stop", "length"]
    temperature: float
    top_p: float
    top_k: int
    """0: all."""
    num_prompt_tokens: int
    """The prompt as the engine counted it, image placeholders expanded."""
    num_cached_tokens: int
    text: str
    """What the client was told, without stop string and calls of tools."""

    def __post_init__(self) -> None:
        length = len(self.output_ids)
        for name, dtype in (("input_ids", "<i4"), ("output_ids", "<i4"), ("logprobs", "<f4")):
            array = getattr(self, name)
            if array.dtype.str != dtype or array.shape != (len(array) if name == "input_ids" else length,):
                raise ValueError(f"{name} must be {dtype}[{length}], not {array.dtype.str}{list(array.shape)}")
        if sum(span.num_tokens for span in self.version_spans) != length or length == 0:
            raise ValueError(f"{length} tokens were sampled, and version spans cover {self.version_spans}")

    def sample(self, verdict: Verdict) -> Sample:
        """The call as a sample to train on; all its images are the sample's own."""
        num_prompt, num_own = len(self.input_ids), len(self.output_ids)
        return Sample(
            token_ids=np.concatenate([self.input_ids, self.output_ids]),
            loss_mask=np.arange(num_prompt + num_own) >= num_prompt,
            logprobs=np.concatenate([np.zeros(num_prompt, np.float32), self.logprobs]),
            version_spans=self.version_spans,
            images=self.images,
            num_turns=1,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_last_turn_tokens=num_own,
            finish_reason=self.finish_reason,
            verdict=verdict,
            text=self.text,
        )


class Group(Record, frozen=True):
    """All samples of one prompt, or the reason why there are none."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    worker_id: str
    error: str = ""
    """Why the group could not be played; empty when it was."""

    def __post_init__(self) -> None:
        if self.error == "" and len(self.samples) != self.prompt.num_samples:
            raise ValueError(f"a group of {self.prompt.num_samples} samples holds {len(self.samples)}")
        if self.error != "" and self.samples:
            raise ValueError("a failed group holds samples")

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that produced one of its tokens."""
        return min(sample.oldest_version for sample in self.samples)

    @property
    def newest_version(self) -> int:
        """The newest policy version that produced one of its tokens."""
        return max(span.policy_version for sample in self.samples for span in sample.version_spans)


def group_id(run_id: str, index: int) -> str:
    """The identity of the run's `index`-th group."""
    return f"{run_id}/{index}"


def parse_message_id(message_id: str) -> tuple[str, int, int] | None:
    """Run, index and attempt of a prompt or group whose bytes cannot be decoded; None if it is no such id."""
    match message_id.split("/"):
        case [run_id, index, attempt, _] if index.isdecimal() and attempt.isdecimal():
            return run_id, int(index), int(attempt)
        case _:
            return None


def to_builtins(record: Record) -> Any:
    """The record as plain data for JSON, arrays as lists and images as their sizes."""

    def convert(value: Any) -> Any:
        return value.tolist() if isinstance(value, np.ndarray) else f"<{len(value)} bytes>"

    return msgspec.to_builtins(record, builtin_types=(), enc_hook=convert)
