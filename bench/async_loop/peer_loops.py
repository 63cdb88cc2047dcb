"""Loops that wait for the whole batch, as most frameworks do, simulated without any cost of their own.

Both generate a whole batch, in the order of the data, before any of it is trained; slots are filled as in
`perfect_loop`. *Synchronous*: generate, train, push, and so on in turn (TRL, verl and OpenRLHF by default). *One step
off*: the next batch is generated with the previous weights while this one is trained, and both wait for each other
before weights are pushed (verl's one-step-off-policy recipe, slime's `train_async.py`).
"""

import heapq
import itertools

from bench.async_loop.workload import Scenario


def synchronous(scenario: Scenario, *, num_steps: int) -> list[float]:
    """Return the end of each step."""
    batches = _batches(scenario, num_steps)
    return list(itertools.accumulate(_makespan(scenario, batch) + scenario.train_s(batch) for batch in batches))


def one_step_off(scenario: Scenario, *, num_steps: int) -> list[float]:
    """Return the end of each step."""
    *batches, beyond = _batches(scenario, num_steps + 1)
    now, ends = _makespan(scenario, batches[0]), []
    for batch, following in zip(batches, [*batches[1:], beyond], strict=True):
        ends.append(now + scenario.train_s(batch))
        now += max(scenario.train_s(batch), _makespan(scenario, following))
    return ends


def _batches(scenario: Scenario, num: int) -> list[range]:
    size = scenario.groups_per_step
    return [range(first, first + size) for first in range(0, num * size, size)]


def _makespan(scenario: Scenario, batch: range) -> float:
    """Return the seconds from when all slots are free until the last sample of the batch is finished."""
    slots = [0.0] * scenario.num_slots
    for index in batch:
        for seconds in scenario.workload.sample_s(index):
            heapq.heapreplace(slots, slots[0] + seconds)
    return max(slots)
