"""Collects an episode token by token: ids, loss mask, logprobs and version spans.

Invariants: the policy's own tokens carry the engine's logprobs and a version span; all others carry neither. Appended
tokens never change: where tokens are left out, another sequence begins, whose copied tokens are all context. So each
token is trained once, after exactly the ids that it was sampled after. Engines' answers are checked here, before
anything learns from them.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from penstock.errors import PenstockError
from penstock.records import TokenSequence, Turn, VersionSpan
from penstock.v1 import generate_pb2
from services.rollout.worker.episodes.routed_experts import array_of

FinishReasonValue: TypeAlias = generate_pb2.FinishReason.ValueType
STOP = generate_pb2.FINISH_REASON_STOP
LENGTH = generate_pb2.FINISH_REASON_LENGTH
DEADLINE = generate_pb2.FINISH_REASON_DEADLINE
_MAX_TOOL_NAME_CHARS = 64
"""As of a `Tool`; a policy may write any name."""


class Trajectory:
    """The tokens of one sample so far."""

    def __init__(
        self, *, min_version: int, exact_version: int | None = None, forbidden_ids: Collection[int] = ()
    ) -> None:
        """Begin empty.

        Args:
            min_version: The oldest policy version that may produce a token.
            exact_version: The only version that may; None for any from `min_version` on.
            forbidden_ids: Ids that may never be sampled.
        """
        self._min_version = min_version
        self._exact_version = exact_version
        self._forbidden_ids = frozenset(forbidden_ids)
        self._ids: list[int] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []
        self._images: list[str] = []
        self._num_answered_images = 0
        self._turns: list[Turn] = []
        self._turn_ranges: list[range] = []
        self._complete: list[TokenSequence] = []
        self._experts: list[np.ndarray] = []
        """Of the first tokens, images expanded, without a gap."""
        self.last_finish: FinishReasonValue = generate_pb2.FINISH_REASON_UNSPECIFIED

    @property
    def token_ids(self) -> list[int]:
        """All ids of the policy's context, one placeholder per image."""
        return self._ids

    @property
    def images(self) -> list[str]:
        """Content hashes of all images so far, in the order of their placeholders."""
        return self._images

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns so far."""
        return tuple(self._turns)

    @property
    def turn_ranges(self) -> Sequence[range]:
        """Ranges in `token_ids` of the policy's turns since the beginning, or since tokens were last left out."""
        return self._turn_ranges

    @property
    def num_context_tokens(self) -> int:
        """Tokens that the engine holds after the last turn, image placeholders expanded."""
        last = self._turns[-1]
        return last.num_prompt_tokens + last.num_output_tokens

    @property
    def num_routed_tokens(self) -> int:
        """Tokens from the beginning on, image placeholders expanded, whose experts are known."""
        return sum(map(len, self._experts))

    def add_observation(self, ids: Collection[int], images: Collection[str] = ()) -> None:
        """Append ids that the policy did not produce, and their images: the prompt, or an environment's answer."""
        self._ids.extend(ids)
        self._mask.extend([False] * len(ids))
        self._logprobs.extend([0.0] * len(ids))
        self._images.extend(images)

    def leave_out(self, kept: Sequence[int]) -> None:
        """Continue from the `kept` ids; do nothing if those are all. No image is left out."""
        if len(kept) == len(self._ids):
            return
        self._complete.append(self._sequence())
        self._ids, self._mask, self._logprobs = list(kept), [False] * len(kept), [0.0] * len(kept)
        self._spans, self._turn_ranges, self._experts = [], [], []

    def add_step(self, reward: float | None, metrics: Mapping[str, float]) -> None:
        """Record the environment's reward and metrics for the last turn.

        Raises:
            ValueError: the rewards of all turns add up to more than a float can hold.
        """
        self._turns[-1] = msgspec.structs.replace(self._turns[-1], reward=reward, metrics=dict(metrics))
        if not math.isfinite(total := sum(turn.reward or 0.0 for turn in self._turns)):
            raise ValueError(f"the rewards of its steps add up to {total}; return smaller ones")

    def add_tools(self, names: Iterable[str]) -> None:
        """Record the names of the tools that the policy called in the last turn."""
        tools = tuple(name[:_MAX_TOOL_NAME_CHARS] for name in names)
        self._turns[-1] = msgspec.structs.replace(self._turns[-1], tools=tools)

    def add_environment_time(self, seconds: float) -> None:
        """Record for how long the environment was asked about the last turn."""
        self._turns[-1] = msgspec.structs.replace(self._turns[-1], environment_s=seconds)

    def add_turn(
        self,
        response: generate_pb2.GenerateResponse,
        *,
        started_at: float = 0.0,
        waited_s: float = 0.0,
        generated_s: float = 0.0,
    ) -> None:
        """Append a turn of the policy.

        Raises:
            PenstockError: the answer contradicts itself or the request.
        """
        ids = list(response.output_ids)
        spans = [
            VersionSpan(num_tokens=span.num_tokens, policy_version=span.policy_version)
            for span in response.version_spans
        ]
        experts, problem = None, self._find_problem(response, ids, spans)
        if not problem and response.HasField("routed_experts"):
            try:
                experts = self._read_experts(response, num_output_tokens=len(ids))
            except ValueError as error:
                problem = str(error)
        if problem:
            raise PenstockError(f"replica {response.replica_id or '?'} gave an answer that cannot be used: {problem}")
        if experts is not None:
            self._experts.append(experts)
        self._turn_ranges.append(range(len(self._ids), len(self._ids) + len(ids)))
        self._num_answered_images = len(self._images)
        self._ids.extend(ids)
        self._mask.extend([True] * len(ids))
        self._logprobs.extend(response.logprobs)
        for span in spans:
            self._add_span(span)
        self._turns.append(
            Turn(
                replica_id=response.replica_id,
                num_prompt_tokens=response.usage.num_prompt_tokens,
                num_cached_tokens=response.usage.num_cached_tokens,
                num_output_tokens=len(ids),
                started_at=started_at,
                waited_s=waited_s,
                generated_s=generated_s,
            )
        )
        self.last_finish = response.finish_reason

    def to_sequences(self) -> tuple[TokenSequence, ...]:
        """Return the tokens as sequences for the trainer: one, and one more for each time that tokens were left out.

        What follows the policy's last turn is not in them. Nothing is learned from it, and it may hold an image that
        nobody can read, if the next turn failed.
        """
        return (*self._complete, *([self._sequence()] if any(self._mask) else []))

    def _sequence(self) -> TokenSequence:
        last, end = self._turns[-1], self._turn_ranges[-1].stop
        return TokenSequence(
            token_ids=np.array(self._ids[:end], dtype="<i4"),
            loss_mask=np.array(self._mask[:end], dtype="|b1"),
            logprobs=np.array(self._logprobs[:end], dtype="<f4"),
            version_spans=tuple(self._spans),
            images=tuple(self._images[: self._num_answered_images]),
            num_prompt_tokens=last.num_prompt_tokens,
            num_last_turn_tokens=last.num_output_tokens,
            routed_experts=np.concatenate(self._experts) if self._experts else None,
        )

    def _read_experts(self, response: generate_pb2.GenerateResponse, *, num_output_tokens: int) -> np.ndarray:
        """Return the experts of the tokens after those that are known.

        Raises:
            ValueError: they are those of other tokens, or of another model.
        """
        message = response.routed_experts
        experts, first = array_of(message), self.num_routed_tokens
        num_computed = response.usage.num_prompt_tokens + num_output_tokens - 1  # the last is sampled, not computed
        if message.first_token != first or len(experts) != num_computed - first:
            raise ValueError(
                f"experts of {len(experts)} tokens from {message.first_token} on, where {num_computed - first} were "
                f"computed from {first} on"
            )
        if self._experts and (experts.dtype, experts.shape[1:]) != (self._experts[0].dtype, self._experts[0].shape[1:]):
            raise ValueError(
                f"experts of shape {list(experts.shape[1:])}, but {list(self._experts[0].shape[1:])} in earlier turns"
            )
        return experts

    def _add_span(self, span: VersionSpan) -> None:
        if self._spans and self._spans[-1].policy_version == span.policy_version:
            span = VersionSpan(
                num_tokens=self._spans.pop().num_tokens + span.num_tokens, policy_version=span.policy_version
            )
        self._spans.append(span)

    def _find_problem(
        self, response: generate_pb2.GenerateResponse, ids: list[int], spans: list[VersionSpan]
    ) -> str | None:
        if not ids:
            return "it holds no token"
        if len(response.logprobs) != len(ids):
            return f"{len(response.logprobs)} logprobs for {len(ids)} tokens"
        if not all(map(math.isfinite, response.logprobs)):
            return "a logprob is not finite"
        if any(span.num_tokens < 1 for span in spans) or sum(span.num_tokens for span in spans) != len(ids):
            return f"version spans of {[span.num_tokens for span in spans]} tokens for {len(ids)} tokens"
        oldest = min(span.policy_version for span in spans)
        newest = max(span.policy_version for span in spans)
        if self._exact_version is not None and {oldest, newest} != {self._exact_version}:
            return f"tokens of policy versions {oldest} to {newest}, but only {self._exact_version} was asked for"
        if oldest < self._min_version:
            return f"tokens of policy version {oldest}, but at least {self._min_version} was asked for"
        if not self._forbidden_ids.isdisjoint(ids):
            return f"ids {sorted(self._forbidden_ids.intersection(ids))} may never be sampled"
        if response.finish_reason not in (STOP, LENGTH, DEADLINE):
            return f"finish reason {response.finish_reason}"
        return None
