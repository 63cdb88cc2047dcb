"""The engines and workers of a run, whose numbers may change while it goes on.

Invariant: a process that leaves keeps its name, and what it computes on, until it has ended.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from penstock import config as configuration
from penstock.errors import ConfigError
from services.launch.process.spec import ProcessSpec
from services.launch.run_plan import PlannedProcess, plan_processes
from services.launch.supervisor import Supervisor
from services.recipe import Recipe

SCALED: Final = {
    "rollout": "rollout.replicas",
    "prefill": "rollout.prefill",
    "decode": "rollout.decode",
    "worker": "worker.num",
}
"""The kinds of processes whose number may change, and the settings with their number."""


def parse_counts(arguments: Sequence[str]) -> dict[str, int]:
    """Read `rollout=6 worker=2`.

    Raises:
        ConfigError: an argument is not of this form, or names another kind.
    """
    counts = {}
    for argument in arguments:
        kind, _, number = argument.partition("=")
        if kind not in SCALED:
            raise ConfigError(f"{argument!r}: {kind!r} cannot be scaled; write KIND=N with one of {', '.join(SCALED)}")
        if not number.isdecimal():
            raise ConfigError(f"{argument!r} has no number of processes; write {kind}=N")
        counts[kind] = int(number)
    if not counts:
        raise ConfigError("no kind of process is named; write KIND=N, for example rollout=6")
    return counts


class Fleet:
    """The processes of a run by name, and how to start further ones."""

    def __init__(
        self,
        recipe_file: Path,
        planned: Sequence[PlannedProcess],
        *,
        make_specs: Callable[[Recipe, Sequence[PlannedProcess]], Sequence[ProcessSpec]],
        require_dispensable: Callable[[Sequence[str]], None] = lambda names: None,
        forget: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Begin with the processes of the plan.

        Args:
            recipe_file: The recipe with the addresses of this launch.
            planned: The processes that run.
            make_specs: Returns how to start further processes. Raises ConfigError if there is no room for them.
            require_dispensable: Is told the names of processes that would leave. Raises ConfigError if one must stay.
            forget: Is told the name of a process that has left.
        """
        self._recipe_file = recipe_file
        self._names = [process.name for process in planned]
        self._own_bus = "nats" in self._names
        self._make_specs = make_specs
        self._require_dispensable = require_dispensable
        self._forget = forget
        self._counts: dict[str, int] = {}
        self._leaving: set[str] = set()

    def scale(self, counts: Mapping[str, int], supervisor: Supervisor) -> list[str]:
        """Start and end processes until the run has these numbers of them, and say which.

        Raises:
            ConfigError: the numbers are impossible, there is no room, a process must stay, or one of that name is still
                ending.
        """
        if supervisor.has_begun_to_stop:
            raise ConfigError("the run is being stopped; continue it with --resume and the numbers that you want")
        wanted = self._counts | dict(counts)
        overrides = [f"--{SCALED[kind]}={count}" for kind, count in wanted.items()]
        recipe = configuration.load(Recipe, [self._recipe_file], overrides)
        planned = {process.name: process for process in plan_processes(recipe, own_bus=self._own_bus)}
        added = [process for name, process in planned.items() if name not in self._names]
        if leaving := sorted(process.name for process in added if process.name in self._leaving):
            raise ConfigError(f"{', '.join(leaving)} is still ending; try again in a moment")
        removed = [name for name in self._names if name not in planned]
        self._require_dispensable(removed)
        specs = self._make_specs(recipe, added)
        self._counts = wanted
        self._names = [name for name in self._names if name in planned] + [spec.name for spec in specs]
        for name in removed:
            self._leaving.add(name)
            supervisor.retire(name, functools.partial(self._has_left, name))
        for spec in specs:
            supervisor.add(spec, functools.partial(self._has_left, spec.name))
        lines = [f"starting {', '.join(spec.name for spec in specs)}"] if specs else []
        lines += [f"ending {', '.join(removed)}"] if removed else []
        return lines or ["the run has these numbers already"]

    def _has_left(self, name: str) -> None:
        self._names = [each for each in self._names if each != name]  # it may have left by itself
        self._leaving.discard(name)
        self._forget(name)
