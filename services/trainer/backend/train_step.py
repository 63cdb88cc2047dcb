"""One optimizer step: groups in, new weights and metrics out.

Legend: G = samples of the batch, N = the policy's own tokens of a micro-batch.

Invariants: the step is the same however the batch is cut into micro-batches; groups of equal reward add nothing to the
gradient, but count in every denominator. A batch of nothing but such groups leaves the weights and AdamW's averages
unchanged.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.trainer.algorithm.advantage import group_advantages
from services.trainer.algorithm.batch_stats import batch_stats
from services.trainer.algorithm.loss import policy_loss, token_weights
from services.trainer.algorithm.token_stats import TokenStats
from services.trainer.backend.optimizer import Optimizer
from services.trainer.batching.micro_batch import MicroBatch, pad, plan_micro_batches
from services.trainer.batching.sequences import TrainGroup, TrainSequence
from services.trainer.config import BackendConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """The batch, sample by sample."""

    sequences: list[TrainSequence]
    num_tokens_G: np.ndarray
    advantages_G: np.ndarray
    weights_G: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """Takes steps with one model and one optimizer."""

    model: Callable[[MicroBatch], torch.Tensor]
    """Returns float32[N], with gradient."""
    optimizer: Optimizer
    device: torch.device
    config: BackendConfig

    def __call__(self, groups: Sequence[TrainGroup], policy_version: int) -> dict[str, float]:
        """Take one step over the whole batch and return its metrics; see `TrainBackend.step`."""
        started = time.perf_counter()
        rows = self._rows(groups)
        stats = TokenStats(self.config.loss, policy_version)
        loss, num_padded = 0.0, 0
        has_gradient = rows.advantages_G != 0
        for chosen in (np.flatnonzero(has_gradient), np.flatnonzero(~has_gradient)):
            lengths = [len(rows.sequences[number]) for number in chosen]
            for plan in plan_micro_batches(lengths, self.config.micro_batch_tokens):
                numbers = [int(chosen[number]) for number in plan]
                num_padded += len(plan) * lengths[plan[0]]
                loss += self._micro_step(rows, numbers, stats)
        metrics = self.optimizer.update(loss)
        duration_s = time.perf_counter() - started
        num_forward = sum(len(sequence) for sequence in rows.sequences)
        staleness = [policy_version - group.oldest_version for group in groups]
        metrics |= batch_stats([group.rewards for group in groups], rows.num_tokens_G, staleness) | stats.metrics()
        metrics |= {
            "loss": loss,
            "step_time_s": duration_s,
            "trained_tokens_per_s": num_forward / duration_s,
            "padding_fraction": 1 - num_forward / num_padded,
        }
        return metrics

    def _rows(self, groups: Sequence[TrainGroup]) -> _Rows:
        sequences = [sequence for group in groups for sequence in group.sequences]
        rewards_G = np.array([reward for group in groups for reward in group.rewards], dtype=np.float64)
        members_G = np.repeat(np.arange(len(groups)), [len(group.sequences) for group in groups])
        num_tokens_G = np.array([sequence.num_own_tokens for sequence in sequences])
        return _Rows(
            sequences=sequences,
            num_tokens_G=num_tokens_G,
            advantages_G=group_advantages(rewards_G, members_G, kind=self.config.loss.advantage),
            weights_G=token_weights(num_tokens_G, self.config.loss.aggregation),
        )

    def _micro_step(self, rows: _Rows, numbers: list[int], stats: TokenStats) -> float:
        """Forward, and backward where there is a gradient; return the micro-batch's share of the loss."""
        batch = pad(
            [rows.sequences[number] for number in numbers],
            rows.advantages_G[numbers].tolist(),
            rows.weights_G[numbers].tolist(),
        ).to(self.device)
        with torch.set_grad_enabled(bool(rows.advantages_G[numbers].any())):
            logprobs_N = self.model(batch)
            loss = policy_loss(
                logprobs_N, batch.engine_logprobs_N, batch.advantages_N, batch.weights_N, self.config.loss
            )
        if loss.requires_grad:
            loss.backward()
        stats.add(
            logprobs_N.detach().float().cpu().numpy(),
            batch.engine_logprobs_N.cpu().numpy(),
            batch.advantages_N.cpu().numpy(),
            batch.versions_N.cpu().numpy(),
        )
        return float(loss.detach())
