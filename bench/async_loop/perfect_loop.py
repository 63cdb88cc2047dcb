"""Penstock's loop without a control plane: the cost of the bound on staleness alone.

An event simulation in which every message, call, push and decision takes no time. It asks the trainer's own ledger, so
gate, deadlines and batch selection are the real ones. It has the same drawn durations and the same number of slots; a
slot that becomes free takes the oldest waiting sample, of any group. So this is the most that Penstock can reach under
the bound by becoming faster itself. Other orders could do better: with lengths known in advance one could begin with
the longest samples, and giving up or splitting long ones would save more. Only max(R/n, U), with neither slots nor
trainer ever idle, limits all of them.

Pushes can have a duration. Slots generate meanwhile, but new weights cannot be sampled before a slot has them, so the
extra time is the cost of the bound itself with such pushes.
"""

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

from bench.async_loop.workload import Scenario
from services.trainer.admission.gate import Gate
from services.trainer.admission.group_state import Arrival
from services.trainer.admission.ledger import GroupLedger

_MANY_STEPS = 1 << 30
"""The run continues after the counted steps, so that the gate does not close towards the end."""
_COMPUTED, _PUSHED = -1, -2
"""Events other than samples: the trainer has computed its groups; a push has reached a slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """How the weights of a step reach the slots, during the next step."""

    total_s: float = 0.0
    rolls: bool = False
    """Whether they reach one slot after another, at even intervals; else all at the end."""


def step_ends(
    scenario: Scenario, *, max_staleness: int, num_steps: int, streams: bool = True, push: Push = Push()
) -> list[float]:
    """Return the time at which each of the first `num_steps` optimizer steps ends, from the first admission.

    With `streams` the trainer computes each group of a batch as soon as possible; else it begins with the whole batch.
    """
    run = _Run(scenario, max_staleness, streams, push)
    while len(run.ends) < num_steps:
        run.go_on()
    return run.ends


@dataclass(slots=True)
class _Group:
    num_left: int
    """Number of unfinished samples."""
    oldest_version: int = -1
    """Version at the beginning of its first sample."""


@dataclass(slots=True)
class _Run:
    scenario: Scenario
    max_staleness: int
    streams: bool
    push: Push
    ends: list[float] = field(default_factory=list)
    now: float = 0.0
    version: int = 1
    """Version of the trainer's weights."""
    admission_version: int = 1
    pushed_version: int = 1
    """Version of the last push that has begun."""
    num_unpushed: int = 0
    """Slots that the push has not reached."""
    is_computing: bool = False
    is_complete: bool = False
    """Whether the running computation is the last of its batch."""
    slot_versions: list[int] = field(init=False)
    free: set[int] = field(init=False)
    """Slots without a sample."""
    ledger: GroupLedger[int, None] = field(init=False)
    groups: dict[int, _Group] = field(default_factory=dict)
    waiting: deque[tuple[int, float, int]] = field(default_factory=deque)
    """Group, duration and oldest version of each sample without a slot; versions never fall."""
    events: list[tuple[float, int, int, int]] = field(default_factory=list)
    """Time, order, group of the finished sample, and its slot; see `_COMPUTED` and `_PUSHED`."""
    order: "itertools.count[int]" = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.slot_versions = [1] * self.scenario.num_slots
        self.free = set(range(self.scenario.num_slots))
        self.ledger = GroupLedger(Gate(max_staleness=self.max_staleness, groups_per_step=self.scenario.groups_per_step))

    def go_on(self) -> None:
        """Do everything possible at this moment, then move on to the next event."""
        self._admit()
        self._fill_slots()
        if not self.is_computing and self.pushed_version == self.version:
            self._start_computing()
        self.now, _, index, slot = heapq.heappop(self.events)
        if index == _COMPUTED:
            self._end_computing()
        elif index == _PUSHED:
            self._end_push(slot)
        else:
            self._end_sample(index, slot)

    def _admit(self) -> None:
        num_steps_ahead = self.version - self.admission_version
        for _ in range(self.ledger.num_admissible(_MANY_STEPS, num_steps_ahead=num_steps_ahead)):
            index = self.ledger.admit(self.admission_version).index
            durations = self.scenario.workload.sample_s(index)
            self.groups[index] = _Group(num_left=len(durations))
            self.waiting.extend((index, seconds, self.admission_version) for seconds in durations)

    def _fill_slots(self) -> None:
        while self.waiting and self.free:
            index, seconds, oldest = self.waiting[0]
            able = [slot for slot in self.free if self.slot_versions[slot] >= oldest]
            if not able:
                return
            self.waiting.popleft()
            slot = min(able, key=lambda slot: (self.slot_versions[slot], slot))
            self.free.remove(slot)
            group = self.groups[index]
            version = self.slot_versions[slot]
            group.oldest_version = version if group.oldest_version < 0 else min(version, group.oldest_version)
            self._schedule(seconds, index, slot)

    def _start_computing(self) -> None:
        if self.ledger.reject_stale(self.version):
            raise AssertionError("the choice by deadline lets nothing go stale")
        selection = self.ledger.select(self.version)
        if selection.is_complete or (self.streams and selection.indices):
            self.ledger.commit(selection.indices)
            self.is_computing, self.is_complete = True, selection.is_complete
            workload = self.scenario.workload
            fixed_s = workload.train_fixed_s if self.is_complete else 0.0
            self._schedule(fixed_s + sum(workload.train_s(index) for index in selection.indices), _COMPUTED)

    def _end_computing(self) -> None:
        self.is_computing = False
        if self.is_complete:
            self.ledger.finish_training()
            self.version += 1
            self.ends.append(self.now)
            self._start_push()

    def _start_push(self) -> None:
        """Push the newest weights, once the previous push is over."""
        if self.num_unpushed or self.pushed_version == self.version:
            return
        num = len(self.slot_versions)
        self.pushed_version, self.num_unpushed = self.version, num
        if not self.push.total_s:
            self.slot_versions, self.num_unpushed = [self.version] * num, 0
            self.admission_version = self.version
            return
        for slot in range(num):
            self._schedule(self.push.total_s * ((slot + 1) / num if self.push.rolls else 1.0), _PUSHED, slot)

    def _end_push(self, slot: int) -> None:
        self.slot_versions[slot] = self.pushed_version
        self.num_unpushed -= 1
        if 2 * self.num_unpushed <= len(self.slot_versions):
            self.admission_version = self.pushed_version
        self._start_push()

    def _end_sample(self, index: int, slot: int) -> None:
        self.free.add(slot)
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

    def _schedule(self, seconds: float, index: int, slot: int = -1) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), index, slot))
