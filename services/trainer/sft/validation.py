"""Validation: the loss on the recipe's evaluation sets.

Invariant: the loss depends on the weights and the sets' rows alone, up to the order of float32 sums in a packed row.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.errors import DataError, InvalidRequestError
from services.trainer.backend.base import SupervisedBackend, TokenLoss
from services.trainer.batching.sequences import TrainSequence
from services.trainer.data.prompt_length import PromptLimit
from services.trainer.evaluation.sets import EvaluationSet
from services.trainer.sft.sequences import DemonstrationReader

SAMPLES_AT_A_TIME: Final = 64
"""Samples in memory at a time: enough to fill rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Measures the loss on every set."""

    sets: Mapping[str, EvaluationSet]
    """Their rows are demonstrations."""
    reader: DemonstrationReader
    limit: PromptLimit
    """Longer samples are left out, as in training."""
    backend: SupervisedBackend

    def measure(self, should_stop: Callable[[], bool], on_progress: Callable[[], object]) -> dict[str, Any] | None:
        """Return metrics of the present weights; None if it was stopped. Blocks.

        Args:
            should_stop: Asked before each `SAMPLES_AT_A_TIME` samples.
            on_progress: Called after them.

        Raises:
            DataError: a row is wrong, or all of a set are too long.
        """
        started = time.monotonic()
        losses: dict[str, TokenLoss] = {}
        num_samples = 0
        for name, each in self.sets.items():
            loss = TokenLoss()
            for sequences in self._chunks(each):
                if should_stop():
                    return None
                loss += self.backend.measure(sequences)
                num_samples += len(sequences)
                on_progress()
            if not loss.num_tokens:
                shortest = min(self.limit.num_tokens(each[row]) for row in range(len(each)))
                refusal = self.limit.refusal(num_rows=len(each), shortest=shortest)
                raise DataError(f"evaluation.sets.{name}: {refusal}")
            losses[name] = loss
        total = sum(losses.values(), TokenLoss())
        return {
            "validation_loss": total.mean,
            **{f"validation_loss_{name}": loss.mean for name, loss in losses.items()},
            "num_validation_samples": num_samples,
            "num_validation_tokens": total.num_tokens,
            "validation_s": time.monotonic() - started,
        }

    def _chunks(self, rows: EvaluationSet) -> Iterator[list[TrainSequence]]:
        chunk: list[TrainSequence] = []
        for row in range(len(rows)):
            example = rows[row]
            try:
                if self.limit.num_tokens(example) > self.limit.max_tokens:
                    continue
                chunk.append(self.reader.read(example))
            except InvalidRequestError as error:
                raise DataError(
                    f"evaluation.sets.{rows.name}, row {row}: {error}; repair the row or remove it"
                ) from None
            if len(chunk) == SAMPLES_AT_A_TIME:
                yield chunk
                chunk = []
        if chunk:
            yield chunk
