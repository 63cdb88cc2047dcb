"""The work of a run that measures the control plane: long samples, of which a given number ends each second.

Control processes pay for tokens, groups, engines and pushes, not for the seconds in which an engine generates. So few
long samples are in play at once, at a pace that the machine can carry, whatever the number of engines.
"""

import dataclasses
import functools

import numpy as np

from bench.async_loop.perfect_loop import step_ends
from bench.async_loop.workload import Scenario, Workload

SAMPLES_PER_GROUP = 8
MAX_STALENESS = 1
_SIGMA = 0.25
"""Standard deviation of the logarithm of a sample's length, so that samples do not end all at once."""
_SLOTS = SAMPLES_PER_GROUP
"""An engine has room for a group, whose samples go to one engine."""
_TRAIN_FIXED_S = 0.01
"""An optimizer step takes next to no time, so that the trainer waits for groups, never groups for the trainer."""
_WARM_UP, _STEPS = 2, 30
"""Steps of the simulation that finds the pace."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What all engines together are given to do."""

    replicas: int
    tokens: int
    """Median tokens of a sample."""
    samples_per_s: float
    """Samples that would end in a second if the control plane took no time, on average over many steps."""
    groups_per_step: int
    num_workers: int
    num_engine_processes: int

    @property
    def groups_in_play(self) -> int:
        """Groups that the gate admits at once."""
        return (MAX_STALENESS + 1) * self.groups_per_step

    @property
    def max_tokens(self) -> int:
        """Most tokens of a sample."""
        return 2 * self.tokens

    def scenario(self) -> Scenario:
        """Return the engines and their work, with the pace at which `samples_per_s` of them end."""
        workload = self._workload(token_s=1.0 / self.tokens)
        ends = self._ends(workload, _WARM_UP + _STEPS)
        rate = _STEPS * self.groups_per_step * SAMPLES_PER_GROUP / (ends[-1] - ends[_WARM_UP - 1])
        return Scenario(
            replicas=self.replicas,
            slots_per_replica=_SLOTS,
            groups_per_step=self.groups_per_step,
            workload=self._workload(token_s=rate / self.samples_per_s / self.tokens),
        )

    def best_groups_per_s(self, *, num_warmup: int, num_steps: int) -> float:
        """Return the groups that these steps would train in a second if the control plane took no time."""
        ends = self._ends(self.scenario().workload, num_warmup + num_steps)
        return num_steps * self.groups_per_step / (ends[-1] - ends[num_warmup - 1])

    def _workload(self, *, token_s: float) -> Workload:
        return Workload(
            seed=0,
            samples_per_group=SAMPLES_PER_GROUP,
            median_tokens=float(self.tokens),
            sigma=_SIGMA,
            max_tokens=self.max_tokens,
            token_s=token_s,
            train_token_s=0.0,
            train_fixed_s=_TRAIN_FIXED_S,
        )

    def _ends(self, workload: Workload, num_steps: int) -> list[float]:
        """Return the ends of steps around engines that have room for all groups in play; others are never used."""
        return _simulated_ends(workload, self.groups_in_play, self.groups_per_step, num_steps)


@functools.lru_cache
def _simulated_ends(workload: Workload, replicas: int, groups_per_step: int, num_steps: int) -> list[float]:
    pool = Scenario(replicas=replicas, slots_per_replica=_SLOTS, groups_per_step=groups_per_step, workload=workload)
    return step_ends(pool, max_staleness=MAX_STALENESS, num_steps=num_steps)


def mean_tokens(workload: Workload, indices: range) -> float:
    """Return the mean tokens of a sample of these groups."""
    return float(np.mean([workload.num_tokens(index) for index in indices]))
