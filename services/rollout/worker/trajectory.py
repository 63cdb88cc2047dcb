"""What an episode leaves behind, token for token: ids, loss mask, logprobs and version spans.

Invariants: the policy's own tokens carry the engine's logprobs and a version span; all others carry neither. What was
appended is never changed. What an engine answers is checked here, before anything learns from it.
"""

import math
from collections.abc import Collection
from typing import TypeAlias

import numpy as np

from penstock.errors import PenstockError
from penstock.records import VersionSpan
from penstock.v1 import generate_pb2

FinishReasonValue: TypeAlias = generate_pb2.FinishReason.ValueType
STOP = generate_pb2.FINISH_REASON_STOP
LENGTH = generate_pb2.FINISH_REASON_LENGTH
DEADLINE = generate_pb2.FINISH_REASON_DEADLINE


class Trajectory:
    """The tokens of one sample, so far."""

    def __init__(self, *, min_version: int, forbidden_ids: Collection[int]) -> None:
        """Begin empty. No token may come from a policy version below `min_version` or be one of `forbidden_ids`."""
        self._min_version = min_version
        self._forbidden_ids = frozenset(forbidden_ids)
        self._ids: list[int] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []
        self.num_turns = 0
        self.num_prompt_tokens = 0
        """The last turn's prompt, as the engine counted it."""
        self.num_cached_tokens = 0
        """Prompt tokens that the engine's prefix cache held, over all turns."""
        self.num_last_turn_tokens = 0
        """Tokens of its own that the policy produced in the last turn."""
        self.last_finish: FinishReasonValue = generate_pb2.FINISH_REASON_UNSPECIFIED

    @property
    def token_ids(self) -> list[int]:
        """All ids so far, one placeholder per image."""
        return self._ids

    @property
    def num_context_tokens(self) -> int:
        """Tokens that the engine holds after the last turn, image placeholders expanded."""
        return self.num_prompt_tokens + self.num_last_turn_tokens

    def add_observation(self, ids: Collection[int]) -> None:
        """Append ids that the policy did not produce: the prompt, or an environment's answer."""
        self._ids.extend(ids)
        self._mask.extend([False] * len(ids))
        self._logprobs.extend([0.0] * len(ids))

    def add_turn(self, response: generate_pb2.GenerateResponse) -> None:
        """Append a turn of the policy.

        Raises:
            PenstockError: the answer contradicts itself or what was asked for.
        """
        ids = list(response.output_ids)
        spans = [
            VersionSpan(num_tokens=span.num_tokens, policy_version=span.policy_version)
            for span in response.version_spans
        ]
        problem = self._find_problem(response, ids, spans)
        if problem:
            raise PenstockError(f"replica {response.replica_id or '?'} gave an answer that cannot be used: {problem}")
        self._ids.extend(ids)
        self._mask.extend([True] * len(ids))
        self._logprobs.extend(response.logprobs)
        for span in spans:
            self._add_span(span)
        self.num_turns += 1
        self.num_prompt_tokens = response.usage.num_prompt_tokens
        self.num_cached_tokens += response.usage.num_cached_tokens
        self.num_last_turn_tokens = len(ids)
        self.last_finish = response.finish_reason

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """token_ids int32[T], loss_mask bool[T], logprobs float32[T]."""
        return (
            np.array(self._ids, dtype="<i4"),
            np.array(self._mask, dtype="|b1"),
            np.array(self._logprobs, dtype="<f4"),
        )

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Over the policy's own tokens, in order; neighbours differ in version."""
        return tuple(self._spans)

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
        if oldest < self._min_version:
            return f"tokens of policy version {oldest}, but at least {self._min_version} was asked for"
        if not self._forbidden_ids.isdisjoint(ids):
            return f"ids {sorted(self._forbidden_ids.intersection(ids))} may never be sampled"
        if response.finish_reason not in (STOP, LENGTH, DEADLINE):
            return f"finish reason {response.finish_reason}"
        return None
