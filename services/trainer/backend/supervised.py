"""The backend of supervised training: the cross-entropy of demonstrations, with the same packed rows and optimizer as
in reinforcement learning.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from penstock.model.families.qwen_vl import IMAGE_PARTS
from services.trainer.algorithm.metrics.experts import expert_stats
from services.trainer.backend.base import TokenLoss
from services.trainer.backend.cross_entropy import add_cross_entropy_gradient, plan_demonstrations
from services.trainer.backend.files.checkpoint_share import Collected
from services.trainer.backend.files.model_state import ModelState
from services.trainer.backend.memory import highest, memory_peaks, reset_memory_peak
from services.trainer.backend.policy.planned_rows import PlannedRows
from services.trainer.backend.ranks.ranks import ALONE, Ranks
from services.trainer.backend.step_work import StepWork
from services.trainer.batching.sequences import TrainSequence
from services.trainer.config import BackendConfig


class InProcessSupervisedBackend:
    """A `SupervisedBackend` on one device."""

    def __init__(
        self,
        model_path: Path,
        config: BackendConfig,
        *,
        seed: int,
        hsdp_replicas: int = 1,
        expert_parallel: int = 1,
        sequence_parallel: int = 1,
        ranks: Ranks = ALONE,
    ) -> None:
        """Choose device and precision; `load` makes the rest.

        Args:
            model_path: Model folder that the run begins with; its tokenizer and processor go into every checkpoint.
            config: How steps are computed.
            seed: Of torch's generator.
            hsdp_replicas: Groups of ranks that each hold shards of all weights.
            expert_parallel: Ranks among which the experts of a layer are divided.
            sequence_parallel: Ranks that compute each row together.
            ranks: All that compute. With several, call each method on all of them, in the same order.

        Raises:
            ConfigError: the device is not there.
        """
        self._model = ModelState(
            model_path,
            config,
            seed=seed,
            temperature=1.0,
            forbidden_ids=(),
            settings={},
            hsdp_replicas=hsdp_replicas,
            expert_parallel=expert_parallel,
            sequence_parallel=sequence_parallel,
            ranks=ranks,
        )

    @property
    def config(self) -> BackendConfig:
        """The settings in use, with device and dtype resolved."""
        return self._model.config

    def load(self, checkpoint: Path | None) -> None:
        """Load a checkpoint, or with None the model folder; see `SupervisedBackend.load`."""
        self._model.load(checkpoint)

    def step(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Update the weights once; see `SupervisedBackend.step`."""
        started = time.perf_counter()
        model = self._model
        reset_memory_peak(model.device)
        rows = self._plan(sequences)
        learned = add_cross_entropy_gradient(model.plain_logprobs, rows)
        if not rows.have_images:
            model.optimizer.discard_parts(IMAGE_PARTS)
        metrics = model.optimizer.update(learned.value)
        if learned.expert_counts_LE is not None:
            metrics |= expert_stats(learned.expert_counts_LE)
        model.finish_step()
        duration_s = time.perf_counter() - started
        num_tokens = sum(map(len, sequences))
        work = StepWork()
        work.add(rows, model.arithmetic, with_gradient=True)
        return metrics | {
            "loss": learned.value,
            "entropy": learned.entropy,
            "num_samples": float(len(sequences)),
            "num_tokens": float(learned.num_learned),
            "sequence_tokens_mean": num_tokens / len(sequences),
            "sequence_tokens_max": float(max(map(len, sequences))),
            "step_time_s": duration_s,
            "trained_tokens_per_s": num_tokens / duration_s,
            "packing_density": rows.token_counts.packing_density,
            **work.metrics(model.arithmetic, num_ranks=model.ranks.size, duration_s=duration_s),
            **highest(model.ranks.gather(memory_peaks(model.device))),
        }

    @torch.no_grad()  # type: ignore[untyped-decorator]  # torch's stubs are skipped
    def measure(self, sequences: Sequence[TrainSequence]) -> TokenLoss:
        """Return the loss of some samples; see `SupervisedBackend.measure`."""
        model = self._model
        computed = [
            (number, counts, -float(model.plain_logprobs(row).logprobs_N.double().sum()))
            for number, row, counts in self._plan(sequences)
        ]
        model.forget_forward()
        total = sum(model.ranks.in_order([(number, loss) for number, counts, loss in computed if counts]))
        return TokenLoss(total=total, num_tokens=sum(sequence.num_own_tokens for sequence in sequences))

    def save(self, folder: Path) -> Mapping[str, str]:
        """Write a checkpoint; see `SupervisedBackend.save`.

        Raises:
            OSError: a file cannot be written.
        """
        return self.write(self.collect(), folder)

    def collect(self) -> Collected:
        """Return what `write` writes. Beside other ranks it is a copy of this rank's share."""
        return self._model.collect({}, {})

    def write(self, collected: Collected, folder: Path) -> Mapping[str, str]:
        """Write this rank's share into `folder`; return the digests of its files, which are on disk, by their paths.

        Raises:
            OSError: a file cannot be written.
        """
        return self._model.write(collected, folder)

    def close(self) -> None:
        """Nothing computes beside this process."""

    def _plan(self, sequences: Sequence[TrainSequence]) -> PlannedRows:
        model = self._model
        return plan_demonstrations(sequences, self.config, model.device, model.ranks, model.row_costs)
