"""The span of one call of an engine."""

import time
from typing import Any, Self

from penstock.telemetry import spans
from penstock.v1 import generate_pb2
from services.rollout.engine.sglang.generation import Generation


class CallSpan:
    """Measures a call during the context."""

    def __init__(self, request: generate_pb2.GenerateRequest) -> None:
        """Measure the call of `request`."""
        self._about: dict[str, Any] = {"request": request.request_id}
        if request.group_id:
            self._about["group"] = request.group_id
        self._began = 0.0

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, GeneratorExit):
            self._about["error"] = "the caller has left"
        elif error is not None:
            self._about["error"] = str(error) or type(error).__name__
        spans.record("call", self._began, **self._about)

    def add(self, part: Generation) -> None:
        """Note a part of the answer."""
        about = self._about
        about.setdefault("first_token_s", time.monotonic() - self._began)
        if part.queued_s is not None:
            about["queued_s"] = part.queued_s
        if part.prefill_s is not None:
            about["prefill_s"] = part.prefill_s
        if part.version_spans:
            about["version"] = part.version_spans[-1][1]
        about["num_tokens"] = part.num_tokens_so_far
        about["num_prompt_tokens"] = part.num_prompt_tokens
        about["num_cached_tokens"] = part.num_cached_tokens
