"""The measures of churn.py, from the calls and replicas that it saw. Pure."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Life:
    """The life of a replica, by one clock."""

    replica_id: str
    max_running: int
    came_at: float = math.inf
    left_at: float = math.inf
    """Time when it was killed or told to drain."""

    def is_there(self, at: float) -> bool:
        """Return whether a call may be given to it."""
        return self.came_at <= at < self.left_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answered call."""

    started_at: float
    ended_at: float
    replica_ids: list[str]
    """Replicas whose tokens the answer has, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one replica had during its life, divided by its even share."""

    life: Life
    lived_s: float
    calls: float
    """Ratio for the calls given."""
    load: float
    """Ratio for the total time of calls in flight."""


def shares(lives: Iterable[Life], sessions: Iterable[Sequence[Turn]], *, until: float) -> list[Share]:
    """Return the shares of each replica, up to the time `until`.

    At any moment the even share of a replica is its max_running divided by that of all present replicas. For a call,
    the share at the moment when the call was given counts; for the load, the share at each moment times the calls then
    in flight. What a replica still does after it began to leave, or after `until`, is nobody's load: it has no share of
    it then.
    """
    by_id = {life.replica_id: life for life in lives}
    turns = itertools.chain.from_iterable(sessions)
    attempts = [attempt for turn in turns for attempt in _attempts(turn, by_id, until=until)]
    num_calls, load_s = dict.fromkeys(by_id, 0), dict.fromkeys(by_id, 0.0)
    for replica_id, start, end in attempts:
        num_calls[replica_id] += 1
        load_s[replica_id] += end - start
    events: list[tuple[float, int, str]] = []  # order within one moment: joins, departures, ends, beginnings
    for life in (each for each in by_id.values() if each.came_at < until):
        events += [(life.came_at, 0, life.replica_id), (min(life.left_at, until), 1, life.replica_id)]
    for _, start, end in attempts:
        events += [(end, 2, ""), (start, 3, "")]
    num_slots = num_in_flight = 0
    calls_per_slot = load_per_slot_s = before = 0.0
    came_with: dict[str, tuple[float, float]] = {}
    found = []
    for at, what, replica_id in sorted(events):
        load_per_slot_s += (at - before) * num_in_flight / num_slots if num_slots else 0.0
        before = at
        if what == 0:
            num_slots += by_id[replica_id].max_running
            came_with[replica_id] = calls_per_slot, load_per_slot_s
        elif what == 1:
            life = by_id[replica_id]
            num_slots -= life.max_running
            calls_before, load_before_s = came_with[replica_id]
            even_calls = life.max_running * (calls_per_slot - calls_before)
            even_load_s = life.max_running * (load_per_slot_s - load_before_s)
            if even_calls and even_load_s:
                calls, load = num_calls[replica_id] / even_calls, load_s[replica_id] / even_load_s
                found.append(Share(life=life, lived_s=at - life.came_at, calls=calls, load=load))
        elif what == 2:
            num_in_flight -= 1
        else:
            num_in_flight += 1
            calls_per_slot += 1 / num_slots if num_slots else 0.0
    return found


def _attempts(turn: Turn, by_id: dict[str, Life], *, until: float) -> Iterable[tuple[str, float, float]]:
    """Return replica, beginning and end of each part of a call that was given before `until`.

    A part ends when its replica begins to leave, and at `until` at the latest.
    """
    start = turn.started_at
    for replica_id in turn.replica_ids:
        if start >= until:
            return
        end = min(max(start, by_id[replica_id].left_at), turn.ended_at, until)
        yield replica_id, start, end
        start = end


def affinity(lives: Iterable[Life], sessions: Iterable[Sequence[Turn]]) -> tuple[int, int, int]:
    """Return the numbers of later turns, of those whose previous replica stayed, and of those that went there."""
    by_id = {life.replica_id: life for life in lives}
    num_later = num_bound = num_kept = 0
    for turns in sessions:
        for before, turn in itertools.pairwise(turns):
            num_later += 1
            home = before.replica_ids[-1]
            if by_id[home].left_at > turn.ended_at:
                num_bound += 1
                num_kept += turn.replica_ids == [home]
    return num_later, num_bound, num_kept
