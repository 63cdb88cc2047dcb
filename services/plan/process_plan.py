"""The contents of a plan: GPUs, processes on them, and the memory of each process at its fullest moments."""

import re
from dataclasses import dataclass
from typing import Self

from penstock.errors import ConfigError
from services.plan.model_shape import ModelShape
from services.plan.moment import Moment

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """Identical GPUs of one machine."""

    count: int
    total_bytes: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `8x80`: eight GPUs with 80 GiB each.

        Raises:
            ConfigError: the text has another form.
        """
        found = re.fullmatch(r"(\d{1,4})x(\d{1,4}(?:\.\d+)?)", text)
        if found is None or int(found[1]) < 1 or float(found[2]) <= 0:
            raise ConfigError(f"--gpus {text!r} is not like 8x80, which is eight GPUs with 80 GiB each; correct it")
        return cls(count=int(found[1]), total_bytes=int(float(found[2]) * GIB))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """A kind of process, and the GPU of each instance."""

    name: str
    count: int
    room_bytes: int
    """Bytes of its GPU that it may take, at moments that have no room of their own."""
    moments: tuple[Moment, ...]
    notes: tuple[str, ...] = ()

    def room_of(self, moment: Moment) -> int:
        """Return the bytes of its GPU that it may take at a moment."""
        return self.room_bytes if moment.room_bytes is None else moment.room_bytes

    @property
    def fits(self) -> bool:
        """Whether it fits at every moment."""
        return all(moment.total_bytes <= self.room_of(moment) for moment in self.moments)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """All kinds of processes of a run that compute on GPUs."""

    shape: ModelShape
    processes: tuple[ProcessPlan, ...]
    host: tuple[Moment, ...]
    """The memory of the machine that all processes of the run take together, at the moments that may be the fullest."""
    remedy: tuple[str, ...] | None = ()
    """Settings with which all would fit; empty if they fit already; None if no such settings were found."""

    @property
    def fits(self) -> bool:
        """Whether every process fits its GPU."""
        return all(process.fits for process in self.processes)
