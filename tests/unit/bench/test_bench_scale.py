"""bench_scale: what it makes of measurements."""

import asyncio
import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from bench.async_loop import virtual_time
from bench.async_loop.measured_loop import LoopError
from bench.scale import bench_scale
from bench.scale.larger_runs import most_engines, needs_of
from bench.scale.measured_run import Measured, fewest, list_again_and_again
from bench.scale.saturation import Costs, Point, Use, costs_of, first_to_saturate
from bench.scale.workload import SAMPLES_PER_GROUP, Load, mean_tokens
from penstock.errors import UnavailableError

LOAD = Load(replicas=64, tokens=16_384, samples_per_s=2.0, groups_per_step=8, num_workers=2, num_engine_processes=1)


def test_the_load_is_what_the_engines_finish() -> None:
    """Over many steps groups end at the rate asked for, if only engines take time; and a group fits on an engine."""
    pool = LOAD.scenario()
    assert LOAD.best_groups_per_s(num_warmup=2, num_steps=30) * SAMPLES_PER_GROUP == pytest.approx(2.0, rel=0.02)
    assert pool.slots_per_replica == SAMPLES_PER_GROUP
    assert 0.95 < mean_tokens(pool.workload, range(4096)) / LOAD.tokens < 1.1


def test_the_first_to_saturate_has_least_room_for_further_groups() -> None:
    """Two workers have two cores; what is spent without groups leaves less room; a free process never fills up."""
    uses = {
        "router": Use(idle_cores=0.2, cores=0.4),
        "workers": Use(idle_cores=0.0, cores=0.4, num_processes=2),
        "free": Use(idle_cores=0.1, cores=0.1),
    }
    assert uses["router"].ms_per_group(0.5) == pytest.approx(400)
    assert [use.max_groups_per_s(0.5) for use in uses.values()] == pytest.approx([2.0, 2.5, math.inf])
    assert first_to_saturate(uses, 0.5) == ("router", pytest.approx(2.0))


@pytest.mark.parametrize(
    "true", [Costs(group_s=0.6, replica_cores=1e-4, push_s=2e-3), Costs(group_s=1.0, replica_cores=0.0, push_s=0.0)]
)
def test_costs_explain_both_measurements(true: Costs) -> None:
    """Groups, leases and pushes are told apart from two numbers of engines at different rates."""

    def point(replicas: int, groups_per_s: float) -> Point:
        pushes_per_s = groups_per_s / 8
        cores = true.cores(groups_per_s=groups_per_s, replicas=replicas, pushes_per_s=pushes_per_s)
        idle = replicas * true.replica_cores
        return Point(
            replicas=replicas,
            groups_per_s=groups_per_s,
            pushes_per_s=pushes_per_s,
            use=Use(idle_cores=idle, cores=cores),
        )

    found = costs_of(point(64, 0.25), point(2048, 0.22))
    assert (found.group_s, found.replica_cores, found.push_s) == pytest.approx(
        (true.group_s, true.replica_cores, true.push_s)
    )
    with pytest.raises(ValueError, match="must be fewer"):
        costs_of(point(64, 0.25), point(64, 0.25))


COSTS = {
    "router": Costs(group_s=0.15, replica_cores=1e-4, push_s=0.0),
    "workers": Costs(group_s=0.16, replica_cores=0.0, push_s=0.0),
    "trainer": Costs(group_s=0.04, replica_cores=0.0, push_s=2e-3),
    "nats-server": Costs(group_s=0.05, replica_cores=1e-4, push_s=0.0),
}


def test_what_a_larger_run_needs() -> None:
    """2,000 engines, 100 groups a second: every router follows all leases, and a push comes every 100 s."""
    needs = needs_of(2_000, COSTS, tokens_per_group=64_000, bus_mb_per_group=(2.0, 4.0))
    assert (needs.groups_per_s, needs.tokens_per_s) == (100.0, 6_400_000.0)
    assert needs.num_routers == 38  # 15 cores of 0.6 - 0.2
    assert needs.num_workers == 27  # 16 cores of 0.6
    assert needs.trainer_cores == pytest.approx(100 * 0.04 + 2_000 * 2e-3 / 100)
    assert needs.nats_cores == pytest.approx(100 * 0.05 + 0.2)
    assert (needs.bus_read_mb_per_s, needs.bus_written_mb_per_s) == (200.0, 400.0)
    assert needs_of(6_000, COSTS, tokens_per_group=64_000, bus_mb_per_group=(2.0, 4.0)).num_routers is None


def test_how_many_engines_fill_a_process() -> None:
    """An engine is a group every 20 s, a push every 100 s, and a lease."""
    assert most_engines(COSTS["trainer"], tokens_per_group=64_000, cores=1.0) == 495
    assert most_engines(COSTS["router"], tokens_per_group=64_000, cores=0.6) == 78
    free = Costs(group_s=0.0, replica_cores=0.0, push_s=0.0)
    assert most_engines(free, tokens_per_group=64_000, cores=1.0) is None


class Router:
    """Lists engines as it is told; None: it does not answer."""

    def __init__(self, *numbers: int | None) -> None:
        self._numbers: Iterator[int | None] = iter(numbers)

    async def list_replicas(self, *, timeout_s: float) -> Any:
        """Return the next number of engines."""
        number = next(self._numbers, 8)
        if number is None:
            raise UnavailableError("the router does not answer")
        return SimpleNamespace(replicas=range(number))


@pytest.mark.parametrize(("numbers", "least"), [((8, 8, 8), 8), ((8, 7, 8), 7), ((8, None, 8), 0)])
def test_every_listing_counts(numbers: tuple[int | None, ...], least: int) -> None:
    """An engine that is missing for half a second is seen, and a router that does not answer lists none."""
    listed: list[int] = []

    async def watch() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(list_again_and_again(Router(*numbers), listed), 9.75)

    virtual_time.run(watch())
    assert len(listed) == 20
    assert fewest(listed) == least


def test_engines_that_were_never_listed_are_not_taken_for_present() -> None:
    """Without a listing there is no measurement."""
    with pytest.raises(LoopError, match="never answered"):
        fewest([])


def test_the_report_names_what_fills_up_first(capsys: pytest.CaptureFixture[str]) -> None:
    """One row for each number of engines, and the costs from the fewest and the most."""
    control = ("nats-server", "router", "workers", "trainer")

    def measured(replicas: int) -> Measured:
        use = Use(idle_cores=1e-4 * replicas, cores=0.05 + 2e-4 * replicas)
        names = (*control, "engines (simulated)")
        return Measured(
            load=Load(**{**{name: getattr(LOAD, name) for name in Load.__slots__}, "replicas": replicas}),
            groups_per_s=0.25,
            offered_groups_per_s=0.25,
            tokens_per_s=32_768.0,
            bus_read_mb_per_s=1.0,
            bus_written_mb_per_s=2.0,
            uses={name: Use(idle_cores=0.0, cores=0.2) if name == "router" else use for name in names},
            memory_mib=dict.fromkeys(names, 100.0),
            num_descriptors=dict.fromkeys(names, 10),
            push_s=0.1,
            fewest_replicas=replicas,
            num_steps=3,
        )

    bench_scale.report([measured(64), measured(2048)])
    out = capsys.readouterr().out
    assert "| 64 | 3 | 0.250 | 100% | 32,768 | 1.00 | 2.00 | 0.10 | 64 | router | 1.25 |" in out
    assert "| 2048 | 3 | 0.250 | 100% | 32,768 | 1.00 | 2.00 | 0.10 | 2048 | nats-server |" in out
    assert "| router | 800 | 0.000 | 0.00 |" in out
    assert "| 2,048 | 50.0 | 6,553,600 | 67 |" in out
    assert "| 200.0, 400.0 | 1.35 |" in out
    assert "one router carries 30 such engines with 60% of its core" in out
    assert all(f"| {name} |" in out for name in control)
