"""One optimizer step: groups in, chunk by chunk as they come, and demonstrations; new weights and metrics out.

Legend: G = samples of the batch, N = the policy's own tokens of a row, L = layers with experts, E = experts of a layer.

Invariants: loss, gradient and metrics are the same however the batch is cut into chunks and rows, and in whichever
order its groups come, up to the order of float32 sums; one order and cut gives the same bits again. Groups without an
advantage add nothing to the policy gradient, but count in every denominator, and so do groups that cannot be trained
because one of their numbers is not finite. A step without a trustworthy gradient leaves weights and AdamW's
averages unchanged, and says why.

How a batch is trained in chunks: the gradient of each is summed with the denominator of the first, and put
right by one factor when the batch is complete. A batch of one chunk is never scaled. Samples without gradient are
measured at the end, so which ones does not depend on the cut. Where a sample's gradient depends on the whole batch,
chunks wait until it is complete (`statistics.whole_batch_setting`).

How demonstrations are learned: their cross-entropy has a denominator of its own, so their rows come last, when the
gradient of the groups has its factor, and are added to it once. Where all tokens with an advantage are rejected the
step learns them alone, as a regulariser would act alone. A batch of which no group can be trained is skipped, and its
demonstrations with it: the batch is broken, and must end the run if others follow.

How a batch is trained by many ranks: each has all groups and plans all rows, computes those that are its own, and
gets the results of the others' tokens from them. So all take the same decisions on the same numbers, work that belongs
to no row is repeated on each, and only the gradient is summed, by `ranks.sharding`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import structlog
import torch

from penstock.model.families.qwen_vl import IMAGE_PARTS
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.loss import Loss, policy_loss
from services.trainer.algorithm.metrics.clamped import CLAMPED_REMEDY, MIN_CLAMPED_FRACTION, clamped_cause
from services.trainer.algorithm.metrics.experts import expert_stats
from services.trainer.algorithm.metrics.samples import batch_stats
from services.trainer.algorithm.metrics.tokens import token_stats, weighted_mean
from services.trainer.algorithm.regularisers import EntropyCoefficient
from services.trainer.algorithm.statistics import (
    BatchStatistics,
    batch_statistics,
    needs_statistics,
    whole_batch_setting,
)
from services.trainer.algorithm.tokens import Tokens, concatenated
from services.trainer.backend.base import Measure, StepTokens
from services.trainer.backend.batch import Batch, is_finite, make_batch, measured_samples
from services.trainer.backend.demonstrations import DemonstrationTerm, LearnedDemonstrations
from services.trainer.backend.optimizer.adamw import REMEDY, Optimizer
from services.trainer.backend.policy.planned_rows import PlannedRows, TokenCounts
from services.trainer.backend.row_passes import ComputedRow, NotFiniteError, PlannedPass, RowPasses
from services.trainer.backend.step_work import Arithmetic, StepWork
from services.trainer.batching.sequences import TrainGroup, TrainSequence
from services.trainer.batching.shared_experts import with_shared_experts

log = structlog.get_logger()

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Inputs shared by all steps."""

    passes: RowPasses
    arithmetic: Arithmetic
    optimizer: Optimizer
    entropy: EntropyCoefficient
    demonstrations: DemonstrationTerm | None
    """Loss term of the demonstrations; None if no step has any."""


@dataclass(slots=True, kw_only=True)
class _Sums:
    """Results of the passes over a batch so far, apart from its gradient."""

    num_chunks: int = 0
    """Chunks whose gradient is in the sum."""
    denominator: float | None = None
    """With which weights are computed; None before the first chunk."""
    loss: float = 0.0
    seen: list[ComputedRow] = field(default_factory=list)
    """The rows with gradient."""
    counts: TokenCounts = field(default_factory=TokenCounts)
    """Of the samples' rows."""
    demonstration_counts: TokenCounts = field(default_factory=TokenCounts)
    work: StepWork = field(default_factory=StepWork)
    """Of all rows."""
    has_images: bool = False
    """Whether any row with gradient had one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Passed:
    """Results of the passes over a whole batch, apart from its gradient."""

    tokens: Tokens
    """All that were computed, detached."""
    terms: Loss
    """Loss terms of these tokens, in float64."""
    counts_N: torch.Tensor
    """Number of tokens of the batch that each of these tokens represents in metrics."""
    expert_counts_LE: torch.Tensor | None
    """Tokens of the batch that chose each expert, in float64; None for a dense model."""


class TrainStep:
    """A step under way: `accumulate` any number of times, then `finish`, or `abort` at any time."""

    def __init__(self, parts: StepParts, policy_version: int) -> None:
        """Begin with nothing.

        Args:
            parts: What the step is computed with.
            policy_version: The published version, which the weights have before the step.
        """
        self._passes = parts.passes
        self._arithmetic = parts.arithmetic
        self._optimizer = parts.optimizer
        self._reference = parts.passes.reference
        self._entropy = parts.entropy
        self._config = parts.passes.config
        self._algorithm = parts.passes.algorithm
        self._demonstration_term = parts.demonstrations
        self._demonstrations: Sequence[TrainSequence] = ()
        self._version = policy_version
        self._waits_for_batch = bool(whole_batch_setting(self._algorithm))
        self._chunks: list[Sequence[TrainGroup]] = []
        self._skipped: set[int] = set()  # numbers of groups of the batch
        self._sums = _Sums()
        self._passed: _Passed | None = None
        self._duration_s = 0.0

    @property
    def tokens(self) -> StepTokens | None:
        """What `finish` computed; see `TrainBackend.step_tokens`."""
        if self._passed is None:
            return None
        tokens, terms = self._passed.tokens, self._passed.terms
        return StepTokens(
            sample_N=tokens.sample_N.numpy(),
            logprobs_N=tokens.logprobs_N.float().numpy(),
            ratio_N=terms.ratio_N.float().numpy(),
            correction_N=terms.correction.weights_N.float().numpy(),
            advantages_N=terms.advantages_N.float().numpy(),
            trained_N=terms.trained_N.numpy(),
            entropy_N=None if tokens.entropy_N is None else tokens.entropy_N.float().numpy(),
        )

    def accumulate(self, groups: Sequence[TrainGroup]) -> None:
        """Add groups to the batch, and their gradient to the sum; see `TrainBackend.accumulate`."""
        started = time.perf_counter()
        first = len(self._groups)
        if self._config.router_replay:
            groups = [with_shared_experts(group) for group in groups]
        self._skipped |= {first + number for number, group in enumerate(groups) if not is_finite(group)}
        self._chunks.append(groups)
        if not self._waits_for_batch:
            self._until_finite(self._sum_chunks)
        self._duration_s += time.perf_counter() - started

    def add_demonstrations(self, sequences: Sequence[TrainSequence]) -> None:
        """Learn these too; see `TrainBackend.add_demonstrations`."""
        if self._demonstrations or self._demonstration_term is None:
            raise ValueError("the step has demonstrations already, or no factor for them")
        self._demonstrations = sequences

    def finish(self) -> Measure:
        """Update the weights; see `TrainBackend.finish_step`."""
        started = time.perf_counter()
        groups = self._groups
        batch, passed = self._until_finite(self._complete)
        self._passed = passed
        self._release_reference()
        for number in sorted(self._skipped):
            log.warning("group.skipped", index=groups[number].index, reason="a number of it is not finite")
        if self._sums.denominator != batch.denominator:
            factor = (self._sums.denominator or 0.0) / batch.denominator
            self._optimizer.scale(factor)
            self._sums.loss *= factor
        learned = self._learn_demonstrations()
        entropy_coef, loss = self._entropy.value, self._sums.loss
        if not self._sums.has_images:
            self._optimizer.discard_parts(IMAGE_PARTS)
        problem, remedy = _problem(passed, self._algorithm, has_demonstrations=learned is not None)
        updated = self._optimizer.update(loss, problem=problem, remedy=remedy)
        if not updated["skipped"]:
            self._count_update(passed)
        self._duration_s += time.perf_counter() - started
        return partial(self._metrics, updated, batch, loss=loss, entropy_coef=entropy_coef, learned=learned)

    def _metrics(
        self,
        updated: dict[str, float],
        batch: Batch,
        *,
        loss: float,
        entropy_coef: float,
        learned: LearnedDemonstrations | None,
    ) -> dict[str, float]:
        """Return the metrics of the finished step, from what belongs to it alone."""
        groups, passed = self._groups, self._passed
        staleness = [self._version - group.oldest_version for group in groups]
        metrics = updated | batch_stats([group.rewards for group in groups], batch.num_tokens_G, staleness)
        metrics |= {
            "num_groups_without_gradient": float(len(groups) - len(set(batch.group_G[batch.has_advantage_G]))),
            "num_groups_skipped": float(len(self._skipped)),
        }
        if passed is not None:
            metrics |= token_stats(
                passed.tokens, passed.terms, self._algorithm, version=self._version, counts_N=passed.counts_N
            )
            if passed.expert_counts_LE is not None:
                metrics |= expert_stats(passed.expert_counts_LE)
        if self._algorithm.entropy.kind != "none":
            metrics["entropy_coef"] = entropy_coef
        if self._config.router_replay:
            metrics["replayed_token_fraction"] = self._sums.counts.replayed_fraction
        if learned is not None:
            metrics |= learned.metrics
        return metrics | {
            "num_tokens": float(batch.num_tokens_G.sum()),
            "num_chunks": 1.0 if self._waits_for_batch else float(len(self._chunks)),
            "loss": loss,
            "step_time_s": self._duration_s,
            "trained_tokens_per_s": sum(map(len, [*batch.sequences, *self._demonstrations])) / self._duration_s,
            "packing_density": (self._sums.counts + self._sums.demonstration_counts).packing_density,
            "shared_token_fraction": self._sums.counts.shared_fraction,
            **self._sums.work.metrics(self._arithmetic, num_ranks=self._passes.ranks.size, duration_s=self._duration_s),
        }

    def abort(self) -> None:
        """Forget the gradient."""
        self._optimizer.discard()
        self._release_reference()

    @property
    def _groups(self) -> list[TrainGroup]:
        return [group for chunk in self._chunks for group in chunk]

    def _until_finite(self, compute: Callable[[], ResultT]) -> ResultT:
        """Compute without the groups for which the policy or the reference computes no number.

        Their share of the sum cannot be told from that of others, so all of the batch is computed again.
        """
        while True:
            try:
                return compute()
            except NotFiniteError as found:
                self._passes.forget_forward()
                self._optimizer.discard()
                self._sums = _Sums()
                group_of = [number for number, group in enumerate(self._groups) for _ in group.samples]
                self._skipped |= {group_of[sample] for sample in found.samples}

    def _sum_chunks(self) -> None:
        """Add the gradient of each chunk that is not in the sum yet."""
        sums = self._sums
        for chunk in self._chunks[sums.num_chunks :]:
            first = sum(map(len, self._chunks[: sums.num_chunks]))
            batch = self._batch(chunk, first, denominator=sums.denominator)
            if sums.denominator is None:
                sums.denominator = batch.denominator
            first_sample = sum(len(group.samples) for group in self._groups[:first])
            self._add_gradient(self._passes.plan(batch, batch.with_gradient, first_sample), BatchStatistics())
            sums.num_chunks += 1

    def _complete(self) -> tuple[Batch, _Passed | None]:
        """Compute what is left of the batch; None if none of its groups can be trained."""
        batch = self._batch(self._groups, 0)
        measured, represented = batch.without_gradient, 1.0
        if measured and not self._algorithm.correction.normalize:  # whose mean weight is over these, too
            measured = measured_samples(batch.without_gradient, self._version)
            represented = len(batch.without_gradient) / len(measured)
        counts_G = torch.ones(len(batch.group_G), dtype=torch.float64)
        counts_G[measured] = represented
        flat = self._passes.plan(batch, measured, 0)
        statistics, seen_flat = BatchStatistics(), self._passes.measure(flat)
        if self._waits_for_batch:
            whole = self._passes.plan(batch, batch.with_gradient, 0)
            if needs_statistics(self._algorithm) and (seen := [*self._passes.measure(whole), *seen_flat]):
                tokens = concatenated([each.tokens for each in seen])
                statistics = batch_statistics(tokens, batch.samples.detached(), self._algorithm)
                self._sums.work.add(whole.rows, self._arithmetic, with_gradient=False)
            self._sums.denominator = batch.denominator
            self._add_gradient(whole, statistics)
        else:
            self._sum_chunks()
        seen = [*self._sums.seen, *seen_flat]
        self._sums.counts += flat.rows.token_counts
        self._count_work(flat.rows, with_gradient=False)
        if not seen:
            return batch, None
        tokens, samples = concatenated([each.tokens for each in seen]), batch.samples.detached()
        terms = policy_loss(tokens, samples, self._algorithm, statistics=statistics, entropy_coef=self._entropy.value)
        return batch, _Passed(
            tokens=tokens,
            terms=terms,
            counts_N=counts_G[tokens.sample_N],
            expert_counts_LE=_sum_of_expert_counts(self._sums.seen, seen_flat, represented),
        )

    def _batch(self, groups: Sequence[TrainGroup], first: int, *, denominator: float | None = None) -> Batch:
        """Return the batch of groups, of which `first` is the first one's number."""
        return make_batch(
            groups,
            {number - first for number in self._skipped},
            algorithm=self._algorithm,
            entropy_coef=self._entropy.value,
            version=self._version,
            device=self._passes.device,
            denominator=denominator,
        )

    def _add_gradient(self, planned: PlannedPass, statistics: BatchStatistics) -> None:
        for loss, row in self._passes.add_gradient(planned, statistics, entropy_coef=self._entropy.value):
            self._sums.loss += loss
            self._sums.seen.append(row)
        self._sums.counts += planned.rows.token_counts
        self._count_work(planned.rows, with_gradient=True)
        self._sums.has_images |= planned.rows.have_images

    def _count_work(self, rows: PlannedRows, *, with_gradient: bool) -> None:
        """Count the passes of the policy and the reference over rows of groups."""
        num_forward = 1 if self._reference is None else 2
        self._sums.work.add(rows, self._arithmetic, num_forward=num_forward, with_gradient=with_gradient)

    def _learn_demonstrations(self) -> LearnedDemonstrations | None:
        """Add their gradient to that of the groups, which has its denominator; None without demonstrations."""
        if self._demonstration_term is None or not self._demonstrations:
            return None
        learned = self._demonstration_term.learn(self._demonstrations)
        self._sums.loss += learned.loss
        self._sums.demonstration_counts = learned.rows.token_counts
        self._sums.work.add(learned.rows, self._arithmetic, with_gradient=True)
        self._sums.has_images |= learned.rows.have_images
        return learned

    def _release_reference(self) -> None:
        if self._reference is not None:
            self._reference.release()

    def _count_update(self, passed: _Passed | None) -> None:
        if self._reference is not None:
            self._reference.count_update()
        if passed is not None and passed.tokens.entropy_N is not None:
            self._entropy.observe(float(weighted_mean(passed.tokens.entropy_N, passed.counts_N)))


def _sum_of_expert_counts(
    with_gradient: Sequence[ComputedRow], without: Sequence[ComputedRow], represented: float
) -> torch.Tensor | None:
    """Return the counts of the whole batch, given how many samples each of those without gradient represents."""
    counts = [row.expert_counts_LE for row in with_gradient if row.expert_counts_LE is not None]
    counts += [represented * row.expert_counts_LE.double() for row in without if row.expert_counts_LE is not None]
    return torch.stack([each.double() for each in counts]).sum(0) if counts else None


def _problem(passed: _Passed | None, config: AlgorithmConfig, *, has_demonstrations: bool) -> tuple[str, str]:
    """Say why no update may follow from a batch, empty if one may, and what helps if that stays."""
    if passed is None:
        return "no group has finite rewards and log-probabilities only", REMEDY
    has_advantage_N = passed.terms.advantages_N != 0
    is_rejected = has_advantage_N.any() and not passed.terms.trained_N.any()
    others_act = has_demonstrations or any(passed.terms.penalties.values())  # a penalty of 0 has no gradient
    if is_rejected and not others_act:
        clamped_fraction = float(passed.terms.clamped_N[has_advantage_N].double().mean())
        if clamped_fraction >= MIN_CLAMPED_FRACTION:
            return clamped_cause(clamped_fraction), CLAMPED_REMEDY
        axes = f"trust_region {config.trust_region.kind}, correction {config.correction.kind}"
        return f"every token with an advantage was rejected ({axes}, rejection {config.rejection.kind})", REMEDY
    return "", REMEDY
