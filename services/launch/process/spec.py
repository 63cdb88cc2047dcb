"""What a process of a run is, wherever it runs."""

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path


class StopPhase(IntEnum):
    """When a process is stopped; processes of a later phase serve those of an earlier one."""

    WORK = 0
    SERVE = 1
    BUS = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """How to start a process, and its role in the run."""

    name: str
    """Unique in the run; also the name of the log."""
    command: Sequence[str]
    environment: Mapping[str, str]
    """On this machine the whole environment; elsewhere what is added to that of the process's host."""
    phase: StopPhase
    service: str = ""
    """The service's name in `penstock serve`."""
    ends_run: bool = False
    """Whether its exit with 0 ends the run; any exit of another process counts as a death. At the end it gets all the
    time that it needs."""
    address: str = ""
    """host:port on which it serves. Port 0: each start gets a free port through `port_key`."""
    port_key: str = ""
    """The setting that holds the port, for example rollout.port."""
    is_ready: Callable[[str], Awaitable[bool]] | None = None
    """Checks whether the process at an address is ready; None: it is ready once it runs."""
    recipe_file: Path | None = None
    """The recipe that the command names; a process on another host gets a copy."""
    error_file: Path | None = None
    """File to which the process writes the error that ends it, as {"error", "message"}."""
