"""What fills up first, and what groups, engines and pushes cost each control process. Pure.

Router and trainer each work on one core at a time, and so does a worker; nats-server uses as many cores as there are.
Costs are taken to be linear: in groups, in engines (leases, each renewed all the time), and in engines times pushes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What one kind of process used, all its processes together."""

    idle_cores: float
    """While no group was played and no push ran."""
    cores: float
    """While groups were played and pushes ran."""
    num_processes: int = 1

    def ms_per_group(self, groups_per_s: float) -> float:
        """Return the milliseconds of a core for a group, pushes included, beyond those of an idle process."""
        return 1e3 * max(0.0, self.cores - self.idle_cores) / groups_per_s

    def max_groups_per_s(self, groups_per_s: float) -> float:
        """Return the rate at which each of the processes has used up a core; infinite if a group costs nothing."""
        cost_s = self.ms_per_group(groups_per_s) / 1e3
        return math.inf if cost_s == 0.0 else max(0.0, self.num_processes - self.idle_cores) / cost_s


def first_to_saturate(uses: Mapping[str, Use], groups_per_s: float) -> tuple[str, float]:
    """Return the kind of process that uses up its cores first, and the groups per second at which it does."""
    name = min(uses, key=lambda each: uses[each].max_groups_per_s(groups_per_s))
    return name, uses[name].max_groups_per_s(groups_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One kind of process at one number of engines."""

    replicas: int
    groups_per_s: float
    pushes_per_s: float
    use: Use


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What one kind of process pays, in seconds of a core."""

    group_s: float
    """For a group."""
    replica_cores: float
    """For an engine, all the time."""
    push_s: float
    """For an engine in a push."""

    def cores(self, *, groups_per_s: float, replicas: int, pushes_per_s: float) -> float:
        """Return the cores that it needs."""
        return groups_per_s * self.group_s + replicas * (self.replica_cores + pushes_per_s * self.push_s)


def costs_of(few: Point, many: Point) -> Costs:
    """Return the costs that explain two measurements, with few engines and with many, none of them negative."""
    if few.replicas >= many.replicas:
        raise ValueError(f"{few.replicas} engines must be fewer than {many.replicas}")
    replica_cores = max(0.0, many.use.idle_cores / many.replicas)

    def busy(point: Point) -> float:
        return max(0.0, point.use.cores - point.replicas * replica_cores)

    # busy = groups_per_s * group_s + replicas * pushes_per_s * push_s, twice
    weights = [(point.groups_per_s, point.replicas * point.pushes_per_s) for point in (few, many)]
    determinant = weights[0][0] * weights[1][1] - weights[1][0] * weights[0][1]
    push_s = (weights[0][0] * busy(many) - weights[1][0] * busy(few)) / determinant if determinant > 0 else 0.0
    push_s = max(0.0, push_s)
    group_s = max(0.0, busy(few) - weights[0][1] * push_s) / few.groups_per_s
    return Costs(group_s=group_s, replica_cores=replica_cores, push_s=push_s)
