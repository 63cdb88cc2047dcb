"""The loop with the real router's placement and the real trainer's chunks, where nothing else takes time.

Slot pool, balancing, limits, ledger and the rule for chunks are the real ones, driven in virtual time; each engine is a
number of slots with a queue. Messages, decisions and pushes take no time. Compared with `perfect_loop`, where a free
slot takes any sample and the trainer each group at once, it shows the cost of placement and chunks. The further loss of
a measured run is the cost of processes, messages and pushes.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from bench.async_loop import virtual_time
from bench.async_loop.workload import Scenario
from penstock.bus.buckets.replica_lease import write_replica
from penstock.runtime.security import Security
from penstock.v1 import common_pb2
from services.router.balancing import Query
from services.router.config import RouterConfig
from services.router.pool import Pool
from services.router.slots.shared_prefill import SharedPrefill
from services.router.slots.slot_pool import SlotPool
from services.router.slots.wait_queue import Ticket
from services.router.tuning import Tuning
from services.trainer.admission.gate import Gate
from services.trainer.admission.group_state import Arrival
from services.trainer.admission.ledger import GroupLedger
from services.trainer.flow.batch_source import is_chunk

_REFRESH_S = 0.2
_REFRESHES_PER_LEASE = 5
_FOR_EVER_S = 1e9
_MANY_STEPS = 1 << 30
_SHAKEN = 0.002
"""Largest random change of a sample's duration, as a share of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """The results of a run."""

    ends: list[float]
    """End of each optimizer step, from the first admission."""
    prefill_ratio: float
    """Prompts computed for each group: one for each replica and version with which samples of it began."""


def run_routed(
    scenario: Scenario, *, max_staleness: int, num_steps: int, pass_tokens: int, chance: random.Random | None = None
) -> Routed:
    """Train some steps.

    Args:
        scenario: Engines and workload.
        max_staleness: The bound.
        num_steps: Optimizer steps.
        pass_tokens: `trainer.micro_batch_tokens`.
        chance: Makes each sample up to 0.2% longer or shorter, as any machine does. Which sample gets which slot then
            differs, and with it the speed of a few steps.
    """
    return virtual_time.run(_run(scenario, max_staleness, num_steps, pass_tokens, chance))


@dataclass(slots=True, eq=False)
class _Engine:
    lease: common_pb2.Replica
    slots: asyncio.Semaphore
    num_calls: int = 0

    def report(self, version: int) -> bytes:
        """Return the lease as the engine would renew it."""
        self.lease.policy_version = version
        self.lease.num_running = min(self.num_calls, self.lease.max_running)
        self.lease.num_queued = self.num_calls - self.lease.num_running
        return write_replica(self.lease)


@dataclass(slots=True)
class _Players:
    """Worker, router and engines."""

    scenario: Scenario
    finish: Callable[[int, int], None]
    """Called with a group's index and its oldest version."""
    chance: random.Random | None
    version: int = 1
    engines: dict[str, _Engine] = field(init=False)
    slots: SlotPool = field(init=False)
    shared_prefill: SharedPrefill = field(default_factory=SharedPrefill)
    pool: Pool = field(init=False)
    watch: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(values={}))
    num_prefills: int = 0
    """Prefills of finished groups."""
    num_groups: int = 0
    """Number of finished groups."""

    def __post_init__(self) -> None:
        num = self.scenario.slots_per_replica
        leases = [
            common_pb2.Replica(
                replica_id=f"engine-{n:04}",
                address="127.0.0.1:1",
                role=common_pb2.REPLICA_ROLE_UNIFIED,
                state=common_pb2.REPLICA_STATE_READY,
                max_running=num,
            )
            for n in range(self.scenario.replicas)
        ]
        self.engines = {lease.replica_id: _Engine(lease, asyncio.Semaphore(num)) for lease in leases}
        watch: Any = self.watch
        self.pool = Pool(watch, watch, watch)
        self.slots = SlotPool(
            RouterConfig(max_waiting=_MANY_STEPS),
            self.pool,
            tuning=Tuning(),
            security=Security(),
            clock=asyncio.get_running_loop().time,
        )
        self.push(1)

    def push(self, version: int) -> None:
        """Give all engines new weights at once."""
        self.version = version
        self._renew_leases()

    async def keep_leases(self) -> None:
        """Renew the leases forever, as engines do."""
        while True:
            for _ in range(_REFRESHES_PER_LEASE):
                await asyncio.sleep(_REFRESH_S)
                self.pool.on_change()
            self._renew_leases()
            self.pool.on_lease_interval()

    async def play(self, index: int) -> None:
        """Play a group as a worker does."""
        version = self.version
        begun = await asyncio.gather(
            *(
                self._play_sample(index, number, seconds, version)
                for number, seconds in enumerate(self.scenario.workload.sample_s(index))
            )
        )
        self.num_groups += 1
        self.num_prefills += len(set(begun))
        self.finish(index, min(version for version, _ in begun))

    async def _play_sample(self, index: int, number: int, seconds: float, min_version: int) -> tuple[int, str]:
        """Play a sample, and return the version and the replica with which it began."""
        if self.chance is not None:
            seconds *= 1 + self.chance.uniform(-_SHAKEN, _SHAKEN)
        query = Query(session_id=f"{index}/{number}", group_id=str(index), min_version=min_version)
        slot = await self.slots.take(Ticket(query=query, deadline=_FOR_EVER_S))
        await self.shared_prefill.enter(slot, index + 1, timeout_s=_FOR_EVER_S)
        engine = self.engines[slot.replica_id]
        engine.num_calls += 1
        async with engine.slots:
            began = self.version, slot.replica_id
            await asyncio.sleep(self.scenario.workload.token_s)
            slot.begin_answer()
            await asyncio.sleep(seconds - self.scenario.workload.token_s)
        engine.num_calls -= 1
        slot.succeed()
        slot.release()
        return began

    def _renew_leases(self) -> None:
        self.watch.values = {name: engine.report(self.version) for name, engine in self.engines.items()}
        self.pool.refresh()


async def _run(
    scenario: Scenario, max_staleness: int, num_steps: int, pass_tokens: int, chance: random.Random | None
) -> Routed:
    work, arrived = scenario.workload, asyncio.Event()
    gate = Gate(max_staleness=max_staleness, groups_per_step=scenario.groups_per_step)
    ledger: GroupLedger[int, None] = GroupLedger(gate)

    def finish(index: int, oldest: int) -> None:
        tokens = sum(work.num_tokens(index))
        ledger.hold(
            Arrival(
                index=index,
                attempt=0,
                oldest_version=oldest,
                newest_version=players.version,
                num_tokens=tokens,
                group=tokens,
            )
        )
        arrived.set()

    players = _Players(scenario, finish, chance)
    ends: list[float] = []
    tasks = {asyncio.create_task(players.keep_leases())}
    while len(ends) < num_steps:
        for _ in range(ledger.num_admissible(_MANY_STEPS)):
            tasks.add(asyncio.create_task(players.play(ledger.admit(players.version).index)))
        is_complete = False
        while not is_complete:
            arrived.clear()
            selection = ledger.select(players.version)
            num_tokens = sum(ledger.held(selection.indices))
            is_complete = selection.is_complete
            if is_complete or is_chunk(
                len(selection.indices),
                num_tokens,
                num_missing=gate.groups_per_step - ledger.num_committed,
                groups_per_step=gate.groups_per_step,
                pass_tokens=pass_tokens,
            ):
                ledger.commit(selection.indices)
                await asyncio.sleep(sum(map(work.train_s, selection.indices)))
            else:
                await arrived.wait()
        await asyncio.sleep(work.train_fixed_s)
        ledger.finish_training()
        ends.append(asyncio.get_running_loop().time())
        players.push(players.version + 1)
    ratio = players.num_prefills / players.num_groups
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await players.slots.aclose()
    return Routed(ends=ends, prefill_ratio=ratio)
