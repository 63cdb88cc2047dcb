"""Samples: one completion of a prompt, over all its turns, with its reward.

Shapes: T = tokens of a sequence (prompt, the policy's own, and observations) with ONE placeholder id per image; S =
tokens that the policy itself produced (`loss_mask` true).
"""

import math
from typing import Literal

import msgspec
import numpy as np

from penstock.records.prompt import check_hashes
from penstock.records.record import Record
from penstock.verdict_status import UNJUDGED


class VersionSpan(Record, frozen=True, kw_only=True, array_like=True):
    """A run of the policy's own tokens from one policy version."""

    num_tokens: int
    policy_version: int

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.policy_version < 0:
            raise ValueError(f"a version span needs num_tokens >= 1 and policy_version >= 0, not {self}")


def check_sampled(
    input_ids: np.ndarray, output_ids: np.ndarray, logprobs: np.ndarray, version_spans: tuple[VersionSpan, ...]
) -> None:
    """Check that the parts of an answer fit each other.

    Args:
        input_ids: int32[P], the prompt.
        output_ids: int32[S], the sampled tokens: at least one.
        logprobs: float32[S], finite.
        version_spans: Their lengths add up to S.

    Raises:
        ValueError: a part does not fit.
    """
    length = len(output_ids)
    for name, array, dtype, wanted in (
        ("input_ids", input_ids, "<i4", len(input_ids)),
        ("output_ids", output_ids, "<i4", length),
        ("logprobs", logprobs, "<f4", length),
    ):
        if array.dtype.str != dtype or array.shape != (wanted,):
            raise ValueError(f"{name} must be {dtype}[{wanted}], not {array.dtype.str}{list(array.shape)}")
    if sum(span.num_tokens for span in version_spans) != length or length == 0:
        raise ValueError(f"{length} tokens were sampled, and version spans cover {version_spans}")
    if not np.isfinite(logprobs).all():
        raise ValueError("logprobs hold a value that is not finite")


class Verdict(Record, frozen=True, kw_only=True):
    """The reward service's judgement of a sample."""

    score: float
    """0 and meaningless if the response was not judged."""
    status: str
    """A `penstock.verdict_status.Status`, for example OK or NO_ANSWER."""
    extracted: str
    method: str

    @property
    def is_judged(self) -> bool:
        """Whether the score has a meaning."""
        return self.status not in UNJUDGED


class Turn(Record, frozen=True, kw_only=True):
    """One Generate call of an episode, and the environment's answer to it.

    Times are 0 where they are not known: in recorded calls that are made samples, and in records of earlier releases.
    Those have no `tools` either.
    """

    replica_id: str
    """The engine that finished the turn; empty if that is not known."""
    num_prompt_tokens: int
    """Prompt tokens as the engine counted them, image placeholders expanded."""
    num_cached_tokens: int
    """Prompt tokens found in the engine's prefix cache."""
    num_output_tokens: int
    started_at: float = 0.0
    """Start time in seconds since 1970; queues come after it. In an agent's session by the router's clock."""
    waited_s: float = 0.0
    """Seconds before the first tokens: queues, retries and prefill."""
    generated_s: float = 0.0
    """Seconds from the first chunk to the last."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the policy called, in order, as it wrote them; each has at most 64 characters.
    Empty if the environment was not asked, and in an agent's session."""
    environment_s: float = 0.0
    """Seconds of the environment's step, including verdicts that it asked for; also 0 if it was not asked, and in an
    agent's session."""
    reward: float | None = None
    """The environment's reward for this step; None if it gave none."""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    """The environment's measurements in this step."""


class TokenSequence(Record, frozen=True, kw_only=True):
    """Tokens that the policy saw as one context. An episode that rewrites its history has several sequences."""

    token_ids: np.ndarray
    """int32[T]"""
    loss_mask: np.ndarray
    """bool[T]: true where the policy itself produced the token."""
    logprobs: np.ndarray
    """float32[T]: the engine's logprob of each of the policy's own tokens; 0 elsewhere."""
    version_spans: tuple[VersionSpan, ...]
    """Spans over the policy's own tokens, in order; their lengths add up to S."""
    images: tuple[str, ...]
    """Content hashes of all images, including the prompt's, in the order of their placeholders."""
    num_prompt_tokens: int
    """Tokens of the last turn's prompt as the engine counted them, image placeholders expanded."""
    num_last_turn_tokens: int
    """The policy's own tokens in the last turn."""
    routed_experts: np.ndarray | None = None
    """uint8 or int32[R, layers, experts per token]: the experts of a mixture that computed the first R tokens in the
    engine, image placeholders expanded. None, or fewer tokens than there are: the experts of the others are not
    known."""

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name, dtype in (("token_ids", "<i4"), ("loss_mask", "|b1"), ("logprobs", "<f4")):
            array = getattr(self, name)
            if array.dtype.str != dtype or array.shape != (length,):
                raise ValueError(f"{name} must be {dtype}[{length}], not {array.dtype.str}{list(array.shape)}")
        own = self.num_own_tokens
        spanned = sum(span.num_tokens for span in self.version_spans)
        if spanned != own:
            raise ValueError(f"version spans cover {spanned} tokens, but the policy produced {own}")
        if own == 0:
            raise ValueError("a sequence holds no token of the policy's own")
        if not np.isfinite(self.logprobs).all():
            raise ValueError("logprobs hold a value that is not finite")
        experts, most = self.routed_experts, self.num_prompt_tokens + self.num_last_turn_tokens
        if experts is not None and (
            experts.dtype.str not in ("|u1", "<i4") or experts.ndim != 3 or len(experts) > most
        ):
            raise ValueError(
                f"routed_experts must be |u1 or <i4 of [at most {most}, layers, experts], not "
                f"{experts.dtype.str}{list(experts.shape)}"
            )
        check_hashes(self.images)

    @property
    def num_own_tokens(self) -> int:
        """S, the policy's own tokens."""
        return int(np.count_nonzero(self.loss_mask))


class Sample(Record, frozen=True, kw_only=True):
    """One completion of a prompt."""

    sequences: tuple[TokenSequence, ...]
    """At least one. The reward belongs to the sample: it counts once, whatever the number of sequences."""
    reward: float | None
    """The environment's reward, or else the verdict's; None if the sample could not be judged."""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    """Other measurements by name."""
    finish_reason: Literal["stop", "length", "deadline", "environment", "error"]
    """stop: the policy finished. length: its last turn was cut, or the context is full. deadline: time ran out.
    environment: the environment ended it early, or the turns were used up. error: see `error`."""
    error: str = ""
    """Why the sample could not be judged, if its environment failed or it broke the replicas that played it."""
    ended_by: str = ""
    """What ended it as `length` or `deadline`: the limit that an observation exceeded, or what ran out of time. Empty
    if the last turn itself was cut."""
    is_cut_short: bool = False
    """Whether it ended before its environment had answered its last turn: a verdict on such a text is not what the
    environment would have made of it. False for single turns and agents, which have no environment that could say
    otherwise."""
    verdict: Verdict | None
    """None if the environment gave the reward."""
    turns: tuple[Turn, ...]
    started_at: float = 0.0
    """Start time in seconds since 1970."""
    elapsed_s: float = 0.0
    """Seconds from the start to the end of the last turn, including queues."""
    text: str
    """The policy's own text, for people and for the verdict."""

    def __post_init__(self) -> None:
        if not self.sequences:
            raise ValueError("a sample holds no sequence")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"reward = {self.reward} must be a finite number, or None if there is no judgement")
        if self.verdict is not None and not self.verdict.is_judged and self.reward is not None:
            raise ValueError(f"reward = {self.reward} contradicts a verdict of {self.verdict.status}; it must be None")

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that produced one of its tokens."""
        return min(span.policy_version for sequence in self.sequences for span in sequence.version_spans)

    @property
    def newest_version(self) -> int:
        """The newest policy version that produced one of its tokens."""
        return max(span.policy_version for sequence in self.sequences for span in sequence.version_spans)

    @property
    def num_own_tokens(self) -> int:
        """Tokens that the policy itself produced."""
        return sum(sequence.num_own_tokens for sequence in self.sequences)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in engines' prefix caches, over all turns."""
        return sum(turn.num_cached_tokens for turn in self.turns)

    @property
    def images(self) -> frozenset[str]:
        """Content hashes of all images of all its sequences."""
        return frozenset(image for sequence in self.sequences for image in sequence.images)
