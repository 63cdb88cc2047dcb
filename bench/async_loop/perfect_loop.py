"""Penstock's loop without a control plane: what the bound on staleness alone costs.

An event simulation in which every message, call, push and decision takes no time. It asks the trainer's own ledger, so
gate, deadlines and choice of the batch are the real ones, and it has the same drawn durations and the same number of
slots; a slot that becomes free takes the oldest sample that waits, of whatever group. So this is the most that Penstock
can reach under the bound by becoming faster itself. It is no limit of what other policies could reach: knowing lengths
beforehand one could begin with the longest samples, and giving up or splitting long ones would save more. Beyond both
is only max(R/n, U): neither slots nor trainer ever idle.
"""

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

from bench.async_loop.workload import Scenario
from services.trainer.admission.gate import Gate
from services.trainer.admission.ledger import Arrival, GroupLedger

_MANY_STEPS = 1 << 30
"""The run goes on after the steps that are looked at, so that the gate does not close towards the end."""


def step_ends(scenario: Scenario, *, max_staleness: int, num_steps: int, streams: bool = True) -> list[float]:
    """Return the time at which each of the first `num_steps` optimizer steps ends, from the first admission.

    With `streams` the trainer computes each group of a batch as soon as it may; else it begins with the whole batch.
    """
    run = _Run(scenario, max_staleness, streams)
    while len(run.ends) < num_steps:
        run.go_on()
    return run.ends


@dataclass(slots=True)
class _Group:
    num_left: int
    """Samples that are not finished."""
    oldest_version: int = -1
    """When its first sample began."""


@dataclass(slots=True)
class _Run:
    scenario: Scenario
    max_staleness: int
    streams: bool
    ends: list[float] = field(default_factory=list)
    now: float = 0.0
    version: int = 1
    is_computing: bool = False
    is_complete: bool = False
    """Whether what is computed is the last of its batch."""
    num_free: int = field(init=False)
    ledger: GroupLedger[int, None] = field(init=False)
    groups: dict[int, _Group] = field(default_factory=dict)
    waiting: deque[tuple[int, float]] = field(default_factory=deque)
    """Group and duration of each sample without a slot."""
    events: list[tuple[float, int, int]] = field(default_factory=list)
    """When, in which order, and which group's sample is finished; -1 is what the trainer computes."""
    order: "itertools.count[int]" = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.num_free = self.scenario.num_slots
        self.ledger = GroupLedger(Gate(max_staleness=self.max_staleness, groups_per_step=self.scenario.groups_per_step))

    def go_on(self) -> None:
        """Do all that can be done at this moment, then move on to the next event."""
        self._admit()
        self._fill_slots()
        if not self.is_computing:
            self._start_computing()
        self.now, _, index = heapq.heappop(self.events)
        if index < 0:
            self._end_computing()
        else:
            self._end_sample(index)

    def _admit(self) -> None:
        for _ in range(self.ledger.num_admissible(_MANY_STEPS)):
            index = self.ledger.admit(self.version).index
            durations = self.scenario.workload.sample_s(index)
            self.groups[index] = _Group(num_left=len(durations))
            self.waiting.extend((index, seconds) for seconds in durations)

    def _fill_slots(self) -> None:
        while self.waiting and self.num_free:
            index, seconds = self.waiting.popleft()
            if self.groups[index].oldest_version < 0:
                self.groups[index].oldest_version = self.version
            self.num_free -= 1
            self._schedule(seconds, index)

    def _start_computing(self) -> None:
        if self.ledger.reject_stale(self.version):
            raise AssertionError("the choice by deadline lets nothing go stale")
        selection = self.ledger.select(self.version)
        if selection.is_complete or (self.streams and selection.indices):
            self.ledger.commit(selection.indices)
            self.is_computing, self.is_complete = True, selection.is_complete
            workload = self.scenario.workload
            fixed_s = workload.train_fixed_s if self.is_complete else 0.0
            self._schedule(fixed_s + sum(workload.train_s(index) for index in selection.indices), -1)

    def _end_computing(self) -> None:
        self.is_computing = False
        if self.is_complete:
            self.ledger.finish_training()
            self.version += 1
            self.ends.append(self.now)

    def _end_sample(self, index: int) -> None:
        self.num_free += 1
        group = self.groups[index]
        group.num_left -= 1
        if not group.num_left:
            del self.groups[index]
            self.ledger.hold(
                Arrival(
                    index=index,
                    attempt=0,
                    oldest_version=group.oldest_version,
                    newest_version=self.version,
                    num_tokens=sum(self.scenario.workload.num_tokens(index)),
                    group=index,
                )
            )

    def _schedule(self, seconds: float, index: int) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), index))
