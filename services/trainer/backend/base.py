"""The seam between the controllers and what computes.

The controller owns the bus, the ledger, the weight sync and the checkpoint folder. A backend owns the model, the
optimizer and every tensor. The controller commands it through this protocol alone, whether the backend is one process
or many ranks.

All methods block for as long as they compute: call them from a thread, one after the other; `save` alone may run beside
others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np

from penstock.weights.named_weights import NamedWeights
from services.trainer.backend.environment import Environment
from services.trainer.batching.sequences import TrainGroup, TrainSequence
from services.trainer.config import BackendConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDigests:
    """The state before a step, in two digests: equal digests mean equal bits."""

    weights: str
    """Over name and value of every master weight."""
    random_state: str
    """Over torch's generators, from which alone a step could draw."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTokens:
    """The policy's own tokens that a step computed, as the loss saw them.

    Legend: N = tokens, those of a sample together, sequence by sequence.
    """

    sample_N: np.ndarray
    """int64: number of the token's sample in the batch, group by group in the order in which they came."""
    logprobs_N: np.ndarray
    """float32: log-probability under the weights before the step."""
    ratio_N: np.ndarray
    """float32: ratio of policy to anchor."""
    correction_N: np.ndarray
    """float32: importance weight of the anchor against the engine."""
    advantages_N: np.ndarray
    """float32."""
    trained_N: np.ndarray
    """bool: whether the token has a policy gradient."""
    entropy_N: np.ndarray | None
    """float32: entropy of the distribution that it was drawn from, in nats; None if the step did not need it."""


Measure: TypeAlias = Callable[[], dict[str, float]]
"""Returns the metrics of a finished step, which nothing changes any more: may be called beside any other method."""


class TrainBackend(Protocol):
    """Trains the policy."""

    @property
    def config(self) -> BackendConfig:
        """The settings in use, with device and dtype resolved."""

    def load(self, checkpoint: Path | None) -> None:
        """Load a checkpoint, or with None the model that the run begins with. Must come before everything else.

        Weights, the optimizer's averages and the random state are the checkpoint's; all settings are the recipe's.

        Raises:
            ConfigError: the folder holds no model that can be loaded.
        """

    def begin_step(self, policy_version: int) -> None:
        """Begin an optimizer step. It ends with `finish_step` or `abort_step`.

        Args:
            policy_version: The published version, which the weights have before the step.
        """

    def accumulate(self, groups: Sequence[TrainGroup]) -> None:
        """Add groups to the step's batch. What can be computed of them is.

        Weights and optimizer stay as they are. The step is the same however its batch is cut into chunks, up to the
        order of float32 sums.

        Args:
            groups: A chunk of the batch, in an order that a replay must repeat.

        Raises:
            DataError: the algorithm cannot work with these groups.
        """

    def add_demonstrations(self, sequences: Sequence[TrainSequence]) -> None:
        """Have the step learn demonstrations too, once: its loss is that of the groups plus `demonstrations.coef` times
        the mean cross-entropy of the demonstrations' learned tokens.

        They are computed in `finish_step`, so the cut of the groups into chunks does not reach them.

        Args:
            sequences: At least one.
        """

    def finish_step(self) -> Measure:
        """Update the weights once, with all groups since `begin_step`, at least one; return what computes the metrics.

        A loss or gradient that is not finite changes nothing; the metrics count it as `skipped`.

        Raises:
            UserError: more than `MAX_SKIPPED_STEPS` steps in a row were skipped.
        """

    def step_tokens(self) -> StepTokens | None:
        """Return the tokens of the step that was finished last, until the next one begins; None if it computed none.

        A share of the samples without gradient is not computed, and has no token here.
        """

    def abort_step(self) -> None:
        """Leave out a step that was begun; weights and optimizer are as before it."""

    def export(self) -> NamedWeights:
        """Return what an engine loads: every parameter under transformers' name, tied ones once, in the push dtype; or
        adapters alone, where only these are trained (`penstock.weights.adapters`).

        Read it before the next `finish_step`: each tensor is made when it is asked for, or is the backend's own.
        Several ranks write their weights when these are read.
        """

    def save(self, folder: Path, *, on_copied: Callable[[], object] | None = None) -> Mapping[str, str]:
        """Write `model/` and the optimizer's state into `folder`, from which `load` continues bit for bit.

        What is written is of the moment after the last step that was finished. The next one may have begun: this may
        run beside `accumulate` and `abort_step`, and from the call of `on_copied` on beside everything but `load`.
        None: nobody waits for it. Files that are written without a copy are complete by then.

        Returns the digest (`file_digest`) of each file that is on the disk, by its path in `folder`.
        """

    def digests(self) -> StateDigests:
        """Return digests of the present state; reads every weight once."""

    def environment(self) -> Environment:
        """Return what the numbers depend on beside the inputs."""

    def close(self) -> None:
        """End what computes beside the controller's process. Nothing may be called afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Cross-entropy of some tokens."""

    total: float = 0.0
    """Sum over the tokens, in nats."""
    num_tokens: int = 0

    def __add__(self, other: TokenLoss) -> TokenLoss:
        """Return the loss of both sets of tokens."""
        return TokenLoss(total=self.total + other.total, num_tokens=self.num_tokens + other.num_tokens)

    @property
    def mean(self) -> float:
        """Mean over the tokens, in nats."""
        return self.total / self.num_tokens


class SupervisedBackend(Protocol):
    """Trains the model to say what it is shown."""

    @property
    def config(self) -> BackendConfig:
        """The settings in use, with device and dtype resolved."""

    def load(self, checkpoint: Path | None) -> None:
        """Load a checkpoint, or with None the model that the run begins with. Must come before everything else.

        Raises:
            ConfigError: the folder holds no model that can be loaded.
        """

    def step(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Update the weights once with the mean cross-entropy of a batch's learned tokens, and return the metrics.

        A loss or gradient that is not finite changes nothing; the metrics count it as `skipped`.

        Args:
            sequences: The batch, at least one sample.

        Raises:
            UserError: more than `MAX_SKIPPED_STEPS` steps in a row were skipped.
        """

    def measure(self, sequences: Sequence[TrainSequence]) -> TokenLoss:
        """Return the cross-entropy of the samples' learned tokens; changes nothing."""

    def save(self, folder: Path) -> Mapping[str, str]:
        """Write `model/` and the optimizer's state into `folder`, from which `load` continues bit for bit.

        Returns the digest (`file_digest`) of each file that is on the disk, by its path in `folder`.
        """

    def close(self) -> None:
        """End what computes beside this process. Nothing may be called afterwards."""


def take_step(
    backend: TrainBackend,
    chunks: Iterable[Sequence[TrainGroup]],
    policy_version: int,
    demonstrations: Sequence[TrainSequence] = (),
) -> dict[str, float]:
    """Take one optimizer step over groups that are all there, and return its metrics.

    Args:
        backend: Takes the step.
        chunks: The batch as it is cut; see `TrainBackend.accumulate`.
        policy_version: The published version, which the weights have before the step.
        demonstrations: What the step learns beside the groups; none: nothing.

    Raises:
        DataError: the algorithm cannot work with these groups.
        UserError: too many steps in a row were skipped.
    """
    backend.begin_step(policy_version)
    try:
        for chunk in chunks:
            backend.accumulate(chunk)
        if demonstrations:
            backend.add_demonstrations(demonstrations)
        measure = backend.finish_step()
    except BaseException:
        backend.abort_step()
        raise
    return measure()
