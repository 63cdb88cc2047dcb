"""A trainer's backend without a model: an optimizer step is a sleep, and the weights are one number."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench.async_loop.workload import Workload
from penstock.weights.named_weights import NamedWeights
from services.trainer.backend.base import Measure, StateDigests
from services.trainer.backend.environment import Environment, current_environment
from services.trainer.batching.sequences import TrainGroup, TrainSequence
from services.trainer.config import BackendConfig

_FILE = "num_steps.txt"


class SimulatedBackend:
    """A `TrainBackend` whose steps take as long as the workload says; it writes the beginning and end of each."""

    def __init__(self, config: BackendConfig, workload: Workload, steps_file: Path) -> None:
        """Append one line of JSON for each step to `steps_file`."""
        own = {name: getattr(config, name) for name in BackendConfig.model_fields}
        self._config = BackendConfig(**{**own, "device": "cpu", "dtype": "float32"})
        self._workload = workload
        self._steps_file = steps_file
        self._num_steps = 0
        self._groups: list[TrainGroup] = []

    @property
    def config(self) -> BackendConfig:
        """The settings in use."""
        return self._config

    def close(self) -> None:
        """Do nothing: there is no other process."""

    def load(self, checkpoint: Path | None) -> None:
        """Continue with the checkpoint's number of steps, because there is no model."""
        if checkpoint is not None:
            self._num_steps = int((checkpoint / _FILE).read_text())

    def begin_step(self, policy_version: int) -> None:
        """Begin with no groups."""
        self._groups, self._policy_version, self._began = [], policy_version, time.monotonic()

    def accumulate(self, groups: Sequence[TrainGroup]) -> None:
        """Sleep as long as forward and backward pass of these groups take."""
        time.sleep(sum(self._workload.train_s(group.index) for group in groups))
        self._groups += groups

    def add_demonstrations(self, sequences: Sequence[TrainSequence]) -> None:
        """They take no time."""

    def finish_step(self) -> Measure:
        """Sleep as long as an update takes; the metrics are those that every backend has."""
        time.sleep(self._workload.train_fixed_s)
        self._num_steps += 1
        with self._steps_file.open("a") as file:
            file.write(json.dumps({"step": self._num_steps, "began": self._began, "ended": time.monotonic()}) + "\n")
        staleness = [self._policy_version - group.oldest_version for group in self._groups]
        rewards = [reward for group in self._groups for reward in group.rewards]
        tokens = [sequence.num_own_tokens for group in self._groups for sequence in group.sequences]
        metrics = {
            "num_tokens": float(sum(tokens)),
            "reward_mean": sum(rewards) / len(rewards),
            "staleness_mean": sum(staleness) / len(staleness),
            "staleness_max": float(max(staleness)),
            "num_groups": float(len(self._groups)),
            "num_samples": float(len(rewards)),
            "num_groups_without_gradient": 0.0,
            "grad_norm": 1.0,
            "dlogp_mean": 0.0,
            "dlogp_max": 0.0,
        }
        return lambda: metrics

    def step_tokens(self) -> None:
        """Return None: nothing computes tokens."""

    def abort_step(self) -> None:
        """Forget the groups."""
        self._groups = []

    def export(self) -> NamedWeights:
        """Return the number of steps, so that every version has different weights."""
        return NamedWeights.of({"num_steps": torch.tensor([self._num_steps], dtype=torch.float32)})

    def save(self, folder: Path, *, on_copied: Callable[[], object] | None = None) -> dict[str, str]:
        """Write the number of steps."""
        (folder / _FILE).write_text(str(self._num_steps))
        if on_copied is not None:
            on_copied()
        return {}

    def digests(self) -> StateDigests:
        """Return the number of steps."""
        return StateDigests(weights=str(self._num_steps), random_state="")

    def environment(self) -> Environment:
        """Return this process's environment."""
        return current_environment(torch.device("cpu"))
