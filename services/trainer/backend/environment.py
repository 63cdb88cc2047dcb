"""The environment that a step's numbers depend on besides its inputs: library versions, processor, threads."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The environment of a step. Equal environments on a CPU give equal bits; others agree within rounding errors."""

    torch: str
    torchvision: str
    transformers: str
    pillow: str
    device: str
    """Name of the GPU, or of the CPU and the instruction set that torch uses."""
    num_threads: int
    """Threads of one torch operation: the division of a sum changes its rounding."""
    num_ranks: int = 1
    """Processes that computed the step together."""

    def differences(self, other: "Environment") -> list[tuple[str, str | int, str | int]]:
        """Return name, own value and other value of each field that differs."""
        fields = ((name, getattr(self, name), getattr(other, name)) for name in self.__struct_fields__)
        return [(name, ours, theirs) for name, ours, theirs in fields if ours != theirs]


def current_environment(device: torch.device, *, num_ranks: int = 1) -> Environment:
    """Return the environment of this process, one of `num_ranks`, for computations on `device`."""
    return Environment(
        torch=str(torch.__version__),
        torchvision=version("torchvision"),
        transformers=version("transformers"),
        pillow=version("pillow"),
        device=_cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device),
        num_threads=torch.get_num_threads(),
        num_ranks=num_ranks,
    )


@contextmanager
def computing_threads(num_threads: int) -> Iterator[None]:
    """Make torch use `num_threads` threads per operation within this context."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown CPU'}, {torch.backends.cpu.get_cpu_capability()}"
