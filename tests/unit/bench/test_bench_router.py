"""What `make bench-router` counts."""

import asyncio

import pytest

from bench.async_loop import virtual_time
from bench.router import bench_router
from bench.router.bench_router import measure
from bench.support.router_subjects import Subject

CPU_MS = 2.0
"""Processor time of a call in the router, half when it begins and half when it ends."""


@pytest.mark.parametrize(("num_in_flight", "latency_s"), [(1, 0.25), (64, 0.5), (256, 2.0), (1024, 8.0)])
def test_a_calls_processor_time_does_not_depend_on_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, num_in_flight: int, latency_s: float
) -> None:
    """Also where a call takes longer than the count: as many calls begin as end while it lasts."""
    used_s = 0.0

    async def call(_session: str, latency_s: float) -> None:
        nonlocal used_s
        used_s += CPU_MS / 2e3
        await asyncio.sleep(latency_s + 0.001)
        used_s += CPU_MS / 2e3

    monkeypatch.setattr(bench_router, "cpu_s", lambda _: used_s)
    monkeypatch.setattr(bench_router, "pss_mib", lambda _: 0.0)
    subject = Subject(name="fake", call=call, baseline="fake")
    found = virtual_time.run(measure(subject, num_in_flight=num_in_flight, latency_s=latency_s, duration_s=6.0))
    assert found.cpu_ms == pytest.approx(CPU_MS, rel=0.03)
    assert len(found.over_ms) == pytest.approx(6.0 * num_in_flight / latency_s, rel=0.05)
    assert found.over_ms == pytest.approx([1.0] * len(found.over_ms), abs=1e-3)
