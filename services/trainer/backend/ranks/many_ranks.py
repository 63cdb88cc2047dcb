"""The backend of many ranks: rank 0, beside the controller, passes on every command and takes part in it.

Invariant: all ranks run the same commands in the same order, one at a time. So whatever one of them computes with the
others, the others compute with it.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import structlog

from penstock.errors import PenstockError
from penstock.runtime.process import EXIT_FAILURE
from penstock.weights.named_weights import NamedWeights
from services.trainer.backend.base import Measure, StateDigests, StepTokens, TokenLoss
from services.trainer.backend.environment import Environment
from services.trainer.backend.ranks.beats import Pulse
from services.trainer.backend.ranks.ranks import Ranks
from services.trainer.batching.sequences import TrainGroup, TrainSequence
from services.trainer.config import BackendConfig

log = structlog.get_logger()

_SAVE = "save"
_END = "end"
_PATIENCE_S = 30.0
"""Seconds that the trainer, when it ends, waits for a running command."""


class RankProcesses(Protocol):
    """The other ranks' processes: those that this one has started, or torchrun's."""

    @property
    def are_own(self) -> bool:
        """Whether `close` ends them. Otherwise they end by themselves when they are told that there are no more
        commands."""

    def blame(self) -> None:
        """End this process and say why, if one of them has ended; for a command that failed. Blocks for a moment."""

    def close(self) -> None:
        """End them, or only the watch over them."""


class _ManyRanks:
    """Rank 0, commanding all ranks."""

    def __init__(self, own: Any, ranks: Ranks, processes: RankProcesses, pulse: Pulse) -> None:
        """Command the other ranks, which `follow`.

        Args:
            own: Rank 0's part.
            ranks: All.
            processes: The others'.
            pulse: That of this process.
        """
        self._own = own
        self._ranks = ranks
        self._processes = processes
        self._pulse = pulse
        self._lock = threading.Lock()
        self._is_broken = False
        """Whether a command failed on rank 0 in a way that the others may not share."""

    @property
    def config(self) -> BackendConfig:
        """The settings in use, with device and dtype resolved."""
        config: BackendConfig = self._own.config
        return config

    def load(self, checkpoint: Path | None) -> None:
        """Load a checkpoint, or with None the model folder; see `TrainBackend.load`."""
        self._command("load", checkpoint)

    def save(self, folder: Path, *, on_copied: Callable[[], object] | None = None) -> Mapping[str, str]:
        """Write a checkpoint; see `TrainBackend.save`. Other commands wait while shares are copied, not longer.

        Raises:
            OSError: a rank could not write its files.
        """
        with self._commanding():
            self._ranks.broadcast((_SAVE, (folder,)))
            with self._pulse.command(_SAVE):
                collected = self._own.collect()
        if on_copied is not None:
            on_copied()
        return _write_with_others(self._own, collected, folder, self._ranks, gathering=self._blaming)

    def close(self) -> None:
        """End the other ranks. If a command does not come to its end, this process ends with them, at once."""
        is_free = self._lock.acquire(timeout=_PATIENCE_S)
        self._processes.close()
        if is_free and not self._is_broken and not self._processes.are_own:
            self._ranks.broadcast((_END, ()))
        if not is_free:
            log.error("ranks.left", reason="a command did not come to its end")
            os._exit(EXIT_FAILURE)  # the thread that waits in a collective would never end

    def _command(self, name: str, *args: Any) -> Any:
        with self._commanding():
            self._ranks.broadcast((name, args))
            with self._pulse.command(name):
                return getattr(self._own, name)(*args)

    @contextmanager
    def _commanding(self) -> Iterator[None]:
        """Let no other command begin, and if this one fails, say whose end it was."""
        with self._lock, self._blaming():
            yield

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """If what ranks do together fails, say whose end it was."""
        try:
            yield
        except PenstockError:
            raise  # of all ranks alike
        except BaseException as error:
            self._is_broken = True
            if isinstance(error, Exception):
                log.warning("command.failed", reason=repr(error))
                self._processes.blame()
            raise


class ManyRanksBackend(_ManyRanks):
    """A `TrainBackend` that computes on all ranks; rank 0's part is an `InProcessBackend`."""

    def begin_step(self, policy_version: int) -> None:
        """Begin an optimizer step; see `TrainBackend.begin_step`."""
        self._command("begin_step", policy_version)

    def accumulate(self, groups: Sequence[TrainGroup]) -> None:
        """Add groups to the step's batch; see `TrainBackend.accumulate`."""
        self._command("accumulate", groups)

    def add_demonstrations(self, sequences: Sequence[TrainSequence]) -> None:
        """Have the step learn demonstrations too; see `TrainBackend.add_demonstrations`."""
        self._command("add_demonstrations", sequences)

    def finish_step(self) -> Measure:
        """Update the weights; see `TrainBackend.finish_step`. Rank 0 alone computes the metrics."""
        measure: Measure = self._command("finish_step")
        return measure

    def step_tokens(self) -> StepTokens | None:
        """Return the tokens of the step that was finished last; rank 0 knows those of all ranks."""
        tokens: StepTokens | None = self._own.step_tokens()
        return tokens

    def abort_step(self) -> None:
        """Leave out a step that was begun."""
        self._command("abort_step")

    def export(self) -> NamedWeights:
        """Return what an engine loads; see `TrainBackend.export`. All ranks write it when it is read."""
        weights: NamedWeights = self._own.export()
        return weights.written_by(partial(self._command, "write_weights"))

    def digests(self) -> StateDigests:
        """Return digests of the present weights, and of rank 0's random state."""
        digests: StateDigests = self._command("digests")
        return digests

    def environment(self) -> Environment:
        """Return what the numbers depend on beside the inputs."""
        environment: Environment = self._own.environment()
        return environment


class ManyRanksSupervisedBackend(_ManyRanks):
    """A `SupervisedBackend` that computes on all ranks; rank 0's part is an `InProcessSupervisedBackend`."""

    def step(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Update the weights once; see `SupervisedBackend.step`."""
        metrics: dict[str, float] = self._command("step", sequences)
        return metrics

    def measure(self, sequences: Sequence[TrainSequence]) -> TokenLoss:
        """Return the loss of some samples; see `SupervisedBackend.measure`."""
        loss: TokenLoss = self._command("measure", sequences)
        return loss


def follow(own: Any, ranks: Ranks, pulse: Pulse) -> None:
    """Run the commands of rank 0 with this rank's part, until rank 0 says that it was the last.

    What this rank refuses is in its beat: rank 0 either refuses it too, and decides what becomes of it, or ends
    the trainer.

    Args:
        own: This rank's part.
        ranks: All.
        pulse: That of this process.
    """
    while True:
        name: str
        args: tuple[Any, ...]
        name, args = ranks.broadcast(None)
        if name == _END:
            return
        with suppress(PenstockError), pulse.command(name):
            if name == _SAVE:
                writing = (own, own.collect(), *args, ranks)
                threading.Thread(target=_write_with_others, args=writing, name="checkpoint", daemon=True).start()
                continue
            getattr(own, name)(*args)


def _write_with_others(
    own: Any,
    collected: Any,
    folder: Path,
    ranks: Ranks,
    *,
    gathering: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, str]:
    """Write this rank's share of a checkpoint; return digests of all ranks' files, once all are on their disks.

    Every rank must call this, in a thread that may wait while its rank runs other commands. It waits for the others
    within `gathering`.

    Raises:
        OSError: a rank could not write its files.
        RuntimeError: a rank failed otherwise.
    """
    outcome: Mapping[str, str] | Exception
    try:
        outcome = own.write(collected, folder)
    except OSError as error:
        outcome = OSError(error.errno, error.strerror or str(error), error.filename)
    except Exception as error:  # noqa: BLE001 - the others wait for the outcome, and rank 0 raises it
        outcome = RuntimeError(f"rank {ranks.rank} could not write its share of {folder}: {error!r}")
    with gathering():
        outcomes = ranks.gather_written(outcome)
    if ranks.rank == 0:
        for each in outcomes:
            if isinstance(each, Exception):
                raise each
    return {path: digest for each in outcomes if not isinstance(each, Exception) for path, digest in each.items()}
