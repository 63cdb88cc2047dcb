"""One optimizer step: groups in, new weights and metrics out.

Legend: G = samples of the batch, N = the policy's own tokens of a row.

Invariants: the step is the same however the batch is cut into rows. Groups without an advantage add nothing to
the policy gradient, but count in every denominator, and so do groups that cannot be trained because one of their
numbers is not finite. A step without a gradient that could be trusted leaves weights and AdamW's averages unchanged,
and says why.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
import torch

from services.trainer.algorithm.batch_stats import batch_stats
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.loss import Loss, policy_loss
from services.trainer.algorithm.regularisers import EntropyCoefficient
from services.trainer.algorithm.statistics import BatchStatistics, batch_statistics, needs_statistics
from services.trainer.algorithm.token_stats import token_stats, weighted_mean
from services.trainer.algorithm.tokens import Tokens, concatenated
from services.trainer.backend.batch import Batch, is_finite, make_batch
from services.trainer.backend.logprobs import TokenLogprobs
from services.trainer.backend.optimizer import Optimizer
from services.trainer.backend.reference import ReferencePolicy
from services.trainer.batching.rows import PackedRow
from services.trainer.batching.sequences import TrainGroup
from services.trainer.config import BackendConfig

log = structlog.get_logger()


class _NotFiniteError(Exception):
    """The policy gives samples a log-probability that is not finite."""

    def __init__(self, samples: set[int]) -> None:
        super().__init__(samples)
        self.samples = samples


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Passed:
    """What the passes over a batch gave, beside its gradient."""

    loss: float
    tokens: Tokens
    """All that were computed, detached."""
    terms: Loss
    """Of these, in float64."""
    counts_N: torch.Tensor
    """How many tokens of the batch each of these stands for in metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """Takes steps with one model and one optimizer."""

    model: Callable[[PackedRow], TokenLogprobs]
    """With gradient."""
    optimizer: Optimizer
    reference: ReferencePolicy | None
    """What the loss compares the policy with, if it does."""
    entropy: EntropyCoefficient
    device: torch.device
    config: BackendConfig
    algorithm: AlgorithmConfig

    def __call__(self, groups: Sequence[TrainGroup], policy_version: int) -> dict[str, float]:
        """Take one step over the whole batch and return its metrics; see `TrainBackend.step`."""
        started = time.perf_counter()
        skipped = {number for number, group in enumerate(groups) if not is_finite(group)}
        while True:
            batch = make_batch(
                groups,
                skipped,
                config=self.config,
                algorithm=self.algorithm,
                version=policy_version,
                device=self.device,
            )
            try:
                passed = self._pass_over(batch)
                break
            except _NotFiniteError as found:
                self.optimizer.discard()
                skipped |= {int(batch.group_G[sample]) for sample in found.samples}
        for number in sorted(skipped):
            log.warning("group.skipped", index=groups[number].index, reason="a number of it is not finite")
        entropy_coef = self.entropy.value
        loss = 0.0 if passed is None else passed.loss
        metrics = self.optimizer.update(loss, problem=_problem(passed, self.algorithm))
        if not metrics["skipped"]:
            self._count_update(passed)
        duration_s = time.perf_counter() - started
        staleness = [policy_version - group.oldest_version for group in groups]
        metrics |= batch_stats([group.rewards for group in groups], batch.num_tokens_G, staleness)
        metrics |= {
            "num_groups_without_gradient": float(len(groups) - len(set(batch.group_G[batch.has_advantage_G]))),
            "num_groups_skipped": float(len(skipped)),
        }
        if passed is not None:
            metrics |= token_stats(
                passed.tokens, passed.terms, self.algorithm, version=policy_version, counts_N=passed.counts_N
            )
        if self.algorithm.entropy.kind != "none":
            metrics["entropy_coef"] = entropy_coef
        return metrics | {
            "num_tokens": float(batch.num_tokens_G.sum()),
            "loss": loss,
            "step_time_s": duration_s,
            "trained_tokens_per_s": sum(map(len, batch.sequences)) / duration_s,
            "packing_density": batch.packing_density,
            "shared_token_fraction": batch.shared_token_fraction,
        }

    def _pass_over(self, batch: Batch) -> _Passed | None:
        """Accumulate the gradient of a batch; None if none of its groups can be trained.

        Raises:
            _NotFiniteError: the policy computes no number for some of its samples.
        """
        if not batch.plan:
            return None
        references: list[torch.Tensor | None] = [None] * len(batch.plan)
        if self.reference is not None:
            references = [*self.reference.logprobs(map(batch.row, range(len(batch.plan))))]
        statistics = BatchStatistics()
        if needs_statistics(self.algorithm):
            with torch.no_grad():
                seen = [self._forward(batch, n, references[n]).detached() for n in range(len(batch.plan))]
            statistics = batch_statistics(concatenated(seen), batch.samples.detached(), self.algorithm)
        coef, loss, seen = self.entropy.value, 0.0, []
        for number, reference_N in enumerate(references):
            with torch.set_grad_enabled(batch.has_gradient(number)):
                tokens = self._forward(batch, number, reference_N)
                terms = policy_loss(tokens, batch.samples, self.algorithm, statistics=statistics, entropy_coef=coef)
            if terms.value.requires_grad:
                terms.value.backward()
            seen.append(tokens.detached())
            loss += float(terms.value.detach())
        whole, samples = concatenated(seen), batch.samples.detached()
        terms = policy_loss(whole, samples, self.algorithm, statistics=statistics, entropy_coef=coef)
        return _Passed(loss=loss, tokens=whole, terms=terms, counts_N=batch.counts_G[whole.sample_N])

    def _forward(self, batch: Batch, number: int, reference_N: torch.Tensor | None) -> Tokens:
        row = batch.row(number)
        output = self.model(row)
        is_finite_N = output.logprobs_N.isfinite()
        if not is_finite_N.all():
            raise _NotFiniteError(set(row.sample_N[~is_finite_N].tolist()))
        return Tokens(
            logprobs_N=output.logprobs_N,
            engine_logprobs_N=row.engine_logprobs_N,
            versions_N=row.versions_N,
            sample_N=row.sample_N,
            entropy_N=output.entropy_N,
            reference_logprobs_N=None if reference_N is None else reference_N.to(self.device),
        )

    def _count_update(self, passed: _Passed | None) -> None:
        if self.reference is not None:
            self.reference.count_update()
        if passed is not None and passed.tokens.entropy_N is not None:
            self.entropy.observe(float(weighted_mean(passed.tokens.entropy_N, passed.counts_N)))


def _problem(passed: _Passed | None, config: AlgorithmConfig) -> str:
    """Say why no update may follow from a batch; empty if one may."""
    if passed is None:
        return "no group has finite rewards and log-probabilities only"
    if (passed.terms.advantages_N != 0).any() and not passed.terms.trained_N.any():
        axes = f"trust_region {config.trust_region.kind}, correction {config.correction.kind}"
        return f"every token with an advantage was rejected ({axes}, rejection {config.rejection.kind})"
    return ""
