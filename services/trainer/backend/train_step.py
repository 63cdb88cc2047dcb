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
from services.trainer.algorithm.aggregation import token_weights
from services.trainer.algorithm.batch_stats import batch_stats
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.loss import policy_loss
from services.trainer.algorithm.token_stats import token_stats
from services.trainer.algorithm.tokens import Samples, Tokens, concatenated
from services.trainer.backend.optimizer import Optimizer
from services.trainer.batching.micro_batch import MicroBatch, pad, plan_micro_batches
from services.trainer.batching.sequences import TrainGroup
from services.trainer.config import BackendConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """Takes steps with one model and one optimizer."""

    model: Callable[[MicroBatch], torch.Tensor]
    """Returns float32[N], with gradient."""
    optimizer: Optimizer
    device: torch.device
    config: BackendConfig
    algorithm: AlgorithmConfig

    def __call__(self, groups: Sequence[TrainGroup], policy_version: int) -> dict[str, float]:
        """Take one step over the whole batch and return its metrics; see `TrainBackend.step`."""
        started = time.perf_counter()
        sequences = [sequence for group in groups for sequence in group.sequences]
        num_tokens_G = np.array([sequence.num_own_tokens for sequence in sequences])
        samples = self._samples(groups, num_tokens_G)
        seen: list[Tokens] = []
        loss, num_padded = 0.0, 0
        has_gradient_G = (samples.advantages_G != 0).cpu().numpy()
        for chosen in (np.flatnonzero(has_gradient_G), np.flatnonzero(~has_gradient_G)):
            lengths = [len(sequences[number]) for number in chosen]
            for plan in plan_micro_batches(lengths, self.config.micro_batch_tokens):
                numbers = [int(chosen[number]) for number in plan]
                num_padded += len(plan) * lengths[plan[0]]
                batch = pad([sequences[number] for number in numbers], numbers).to(self.device)
                tokens, part = self._micro_step(batch, samples, with_gradient=bool(has_gradient_G[numbers].any()))
                seen.append(tokens.detached())
                loss += part
        metrics = self.optimizer.update(loss)
        duration_s = time.perf_counter() - started
        num_forward = sum(len(sequence) for sequence in sequences)
        staleness = [policy_version - group.oldest_version for group in groups]
        metrics |= batch_stats([group.rewards for group in groups], num_tokens_G, staleness)
        metrics |= token_stats(concatenated(seen), samples.detached(), self.algorithm, version=policy_version)
        metrics |= {
            "loss": loss,
            "step_time_s": duration_s,
            "trained_tokens_per_s": num_forward / duration_s,
            "padding_fraction": 1 - num_forward / num_padded,
        }
        return metrics

    def _samples(self, groups: Sequence[TrainGroup], num_tokens_G: np.ndarray) -> Samples:
        rewards_G = np.array([reward for group in groups for reward in group.rewards], dtype=np.float64)
        group_G = np.repeat(np.arange(len(groups)), [len(group.sequences) for group in groups])
        advantages_G = group_advantages(rewards_G, group_G, kind=self.algorithm.advantage.kind)
        weights_G = token_weights(num_tokens_G, kind=self.algorithm.aggregation.kind)
        return Samples(
            advantages_G=torch.from_numpy(advantages_G).float().to(self.device),
            weights_G=torch.from_numpy(weights_G).float().to(self.device),
        )

    def _micro_step(self, batch: MicroBatch, samples: Samples, *, with_gradient: bool) -> tuple[Tokens, float]:
        """Forward, and backward where there is a gradient; return tokens and the micro-batch's share of the loss."""
        with torch.set_grad_enabled(with_gradient):
            tokens = Tokens(
                logprobs_N=self.model(batch),
                engine_logprobs_N=batch.engine_logprobs_N,
                versions_N=batch.versions_N,
                sample_N=batch.sample_N,
            )
            loss = policy_loss(tokens, samples, self.algorithm).value
        if loss.requires_grad:
            loss.backward()
        return tokens, float(loss.detach())
