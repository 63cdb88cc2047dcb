"""How many routers, workers and cores runs of other sizes need, from what groups, engines and pushes cost. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from bench.scale.saturation import Costs

ENGINES = (8, 64, 256, 512, 1024, 2048)
"""The sizes in docs/scaling.md."""
ENGINE_TOKENS_PER_S = 64 * 50.0
"""Of an engine that is one GPU: 64 samples at 50 tokens a second each."""
STEP_S = 100.0
"""Between two pushes."""
PLANNED_SHARE = 0.6
"""Of its core that a process which works on one is planned to be busy."""
VERDICTS_S = 0.027
"""Seconds of a core for the verdicts on a group's eight expressions (docs/benchmarks.md, Reward service)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run of so many engines needs."""

    engines: int
    groups_per_s: float
    tokens_per_s: float
    num_routers: int | None
    """None: no number is enough, for the leases alone take more than a router's planned share of its core."""
    num_workers: int
    trainer_cores: float
    nats_cores: float
    bus_read_mb_per_s: float
    """What nats-server reads from its connections and files, in 1e6 bytes a second, leases aside."""
    bus_written_mb_per_s: float
    """What it writes to them."""
    verdict_cores: float


def needs_of(
    engines: int, costs: Mapping[str, Costs], *, tokens_per_group: float, bus_mb_per_group: tuple[float, float]
) -> Needs:
    """Return what a run of this many engines needs.

    Args:
        engines: Engines of one GPU each.
        costs: Of "router", "workers", "trainer" and "nats-server".
        tokens_per_group: All tokens of a group's samples.
        bus_mb_per_group: What nats-server reads and writes for a group, in 1e6 bytes.
    """
    tokens_per_s = engines * ENGINE_TOKENS_PER_S
    rate = tokens_per_s / tokens_per_group
    # Each router follows the lease of every engine.
    room = PLANNED_SHARE - engines * costs["router"].replica_cores
    return Needs(
        engines=engines,
        groups_per_s=rate,
        tokens_per_s=tokens_per_s,
        num_routers=math.ceil(rate * costs["router"].group_s / room) if room > 0.0 else None,
        num_workers=math.ceil(rate * costs["workers"].group_s / PLANNED_SHARE),
        trainer_cores=_cores(costs["trainer"], rate, engines),
        nats_cores=_cores(costs["nats-server"], rate, engines),
        bus_read_mb_per_s=rate * bus_mb_per_group[0],
        bus_written_mb_per_s=rate * bus_mb_per_group[1],
        verdict_cores=rate * VERDICTS_S,
    )


def most_engines(cost: Costs, *, tokens_per_group: float, cores: float) -> int | None:
    """Return how many engines a process carries with this many cores of its own; None if an engine costs nothing."""
    one = _cores(cost, ENGINE_TOKENS_PER_S / tokens_per_group, 1)
    return math.floor(cores / one) if one else None


def _cores(cost: Costs, groups_per_s: float, engines: int) -> float:
    return cost.cores(groups_per_s=groups_per_s, replicas=engines, pushes_per_s=1.0 / STEP_S)
