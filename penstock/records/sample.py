"""Samples: one completion of a prompt, token for token, with its verdict.

Shapes: T = tokens of a sample (prompt, the policy's own, and observations) with ONE placeholder id per image;
S = tokens that the policy itself produced (`loss_mask` true).
"""

from typing import Literal

import numpy as np

from penstock.records.record import Record


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
    finish_reason: Literal["stop", "length", "deadline", "environment", "error"]
    """stop: the policy finished. length: its last turn was cut, or the context is full. deadline: time ran out.
    environment: the environment ended it early, or the turns were used up. error: the environment failed, or the sample
    broke the replicas that played it; the verdict is FAILED."""
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
