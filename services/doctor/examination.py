"""Runs all checks of a machine concurrently, each in bounded time.

Invariant: a check that hangs or breaks becomes a finding, and hides no other.
"""

import dataclasses
import importlib.metadata
import importlib.util
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from penstock.errors import ConfigError
from penstock.runtime.host.available_memory import memory_here
from services.doctor import gpu, memory, network, software
from services.doctor.finding import Finding, Status, blamed, warning
from services.doctor.hub import check_hub
from services.doctor.inputs import check_data, check_model, check_settings
from services.launch.gpu_plan import GpuPlan, find_gpus
from services.launch.run_plan import assign_gpus, assign_sft_gpus, plan_processes
from services.recipe import Recipe

DEADLINE_S = 15.0
"""Seconds for a check that asks this machine or the network."""

_DISTRIBUTIONS = {"PIL": "pillow", "math_verify": "math-verify", "huggingface_hub": "huggingface-hub"}
_SHM = Path("/dev/shm")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check."""

    name: str
    look: Callable[[], Iterable[Finding | None]]
    """Returns the findings; None for anything not worth a line."""
    deadline_s: float


def checks_of(recipe: Recipe | None, *, is_sft: bool = False) -> list[Check]:
    """Return the checks: those of the machine, and with a recipe also those of its needs.

    Args:
        recipe: None: only the machine is checked.
        is_sft: Whether `penstock sft` will run, in place of `penstock train`.
    """
    looks: dict[str, Callable[[], Iterable[Finding | None]]] = {
        "Python": lambda: [software.check_python(tuple(sys.version_info[:3]))],
        "packages": lambda: _sft_packages() if is_sft else _packages(recipe),
        "GPUs": lambda: _gpus(recipe, is_sft=is_sft),
        "memory": lambda: _memory(recipe, is_sft=is_sft),
    }
    if recipe is not None:
        looks |= {
            "model": lambda: [check_model(recipe, is_sft=is_sft)[0]],
            "data": lambda: [check_data(recipe, is_sft=is_sft)],
            "settings": lambda: [check_settings(recipe, is_sft=is_sft)],
            "Hub": lambda: [check_hub(recipe)],
        }
    if recipe is not None and not is_sft:
        looks |= {
            "ports": lambda: [network.check_ports(recipe)],
            "hosts": lambda: [network.check_hosts(list(network.hosts_of(recipe)), network.resolve)],
            "bus": lambda: [network.check_bus(recipe.bus.servers, socket.create_connection)],
        }
    return [
        Check(name=name, look=look, deadline_s=DEADLINE_S + (gpu.PROBE_TIMEOUT_S if name == "GPUs" else 0))
        for name, look in looks.items()
    ]


def examine(checks: Sequence[Check]) -> Iterator[Finding]:
    """Run all checks at once, and yield their findings in order. A check past its deadline is abandoned."""
    begun = time.monotonic()
    looks = [_Look(check) for check in checks]
    for look in looks:
        look.thread.join(max(0.0, begun + look.check.deadline_s - time.monotonic()))
        yield from look.findings()


class _Look:
    """A check in its own thread, which ends with the process if it hangs."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self._found: list[Finding] | None = None
        self.thread = threading.Thread(target=self._run, name=f"doctor-{check.name}", daemon=True)
        self.thread.start()

    def findings(self) -> list[Finding]:
        """Return the check's findings; a warning if it has not ended."""
        found = self._found
        if found is not None:
            return found
        seen = f"no answer within {self.check.deadline_s:g} s"
        return [warning(self.check.name, seen, "look at the disks, the network and name servers of this machine")]

    def _run(self) -> None:
        found: list[Finding] = []
        try:
            found.extend(finding for finding in self.check.look() if finding is not None)
        except Exception as error:  # noqa: BLE001 - a boundary: a check that breaks hides nothing that was found
            seen = f"the check itself failed: {type(error).__name__}: {error}"
            found.append(warning(self.check.name, seen, "please report it, with this line"))
        self._found = found


def _packages(recipe: Recipe | None) -> Iterator[Finding | None]:
    yield software.check_packages(_version_of)
    yield software.check_sglang(_version_of("sglang"), importlib.metadata.requires("penstock") or [])
    beside_python = Path(sys.executable).parent / "nats-server"
    binary = str(beside_python) if beside_python.exists() else shutil.which("nats-server")
    yield software.check_nats_server(binary, recipe.bus.url if recipe is not None else "")


def _sft_packages() -> Iterator[Finding | None]:
    yield software.check_packages(_version_of, software.SFT_PACKAGES)


def _plan(recipe: Recipe, devices: Sequence[str], *, is_sft: bool) -> GpuPlan:
    """Return the GPUs of each process."""
    if not is_sft:
        return assign_gpus(recipe, plan_processes(recipe, own_bus=not recipe.bus.url), devices)
    return assign_sft_gpus(recipe.trainer, devices)


def _for_this_host(found: Finding, recipe: Recipe, *, is_sft: bool) -> Finding:
    """Return a fault in what this host has for the run; of a run that is divided among hosts, it is a warning."""
    is_divided = recipe.launch.backend == "ray" or recipe.slurm.gpus_per_node
    if is_sft or not is_divided or found.status is not Status.FAULT:
        return found
    remedy = "see `penstock slurm --dry-run`, which divides the run among the nodes of a job"
    if recipe.launch.backend == "ray":
        remedy = "see `penstock train`, which looks at all hosts of the Ray cluster before it starts anything"
    return warning(found.name, f"on this host alone: {found.seen}", remedy)


def _lacks_only_gpus(recipe: Recipe) -> bool:
    """Return whether a host with enough GPUs could run the recipe."""
    rollout = recipe.rollout
    num_engines = rollout.replicas + rollout.prefill + rollout.decode
    enough = [str(number) for number in range(max(2, num_engines * rollout.tensor_parallel + recipe.trainer.ranks))]
    try:
        _plan(recipe, enough, is_sft=False)
    except ConfigError:
        return False
    return True


def _gpus(recipe: Recipe | None, *, is_sft: bool) -> Iterator[Finding | None]:
    devices = find_gpus()
    if not devices or _version_of("torch") is None:
        yield gpu.check_gpus(devices, None)
        return
    try:
        facts = gpu.probe_gpus()
    except (TimeoutError, ValueError) as error:
        yield warning("GPUs", str(error), "try `python -c 'import torch; print(torch.cuda.device_count())'`")
        return
    yield gpu.check_gpus(devices, facts)
    if not facts.gpus:
        return
    yield gpu.check_capability(facts)
    yield gpu.check_cudnn(facts)
    if recipe is None or len(facts.gpus) < len(devices):  # no plan for GPUs that torch does not see
        return
    if not is_sft:
        yield gpu.check_attention(facts, recipe.rollout.sglang)
    try:
        plan = _plan(recipe, devices, is_sft=is_sft)
    except ConfigError:
        return  # the check of memory reports it
    if not is_sft:
        yield gpu.check_nccl(facts, plan, recipe.trainer.weight_sync.transport)
    _, size = check_model(recipe)
    if size is not None:
        yield from memory.check_gpu_memory(size, recipe, plan, facts, is_sft=is_sft)


def _memory(recipe: Recipe | None, *, is_sft: bool) -> Iterator[Finding | None]:
    _, size = check_model(recipe) if recipe is not None else (None, None)
    if recipe is not None:
        try:
            plan = _plan(recipe, find_gpus(), is_sft=is_sft)
        except ConfigError as error:
            found = blamed("plan", error)
            yield _for_this_host(found, recipe, is_sft=is_sft) if _lacks_only_gpus(recipe) else found
        else:
            if size is not None:
                found = memory.check_host_memory(size, recipe, plan, memory_here(), is_sft=is_sft)
                yield _for_this_host(found, recipe, is_sft=is_sft)
    if not is_sft:
        yield memory.check_shared_memory(_free(_SHM))
    runs = Path("runs") if recipe is None else recipe.run.folder or recipe.run.dir
    while not os.path.exists(runs):  # false where a folder on the way is closed to us; the path's own method raises
        runs = runs.parent
    yield memory.check_disk(size, recipe, str(runs.resolve()), _free(runs), is_sft=is_sft)
    try:
        temporary = Path(tempfile.gettempdir())
    except FileNotFoundError:  # none of the usual folders is writable
        yield memory.check_temporary(os.environ.get("TMPDIR", "/tmp"), None)
    else:
        yield memory.check_temporary(str(temporary), _free(temporary))


def _free(folder: Path) -> int | None:
    """Return the free bytes in the folder's file system; None if the folder is missing or not writable."""
    return shutil.disk_usage(folder).free if os.access(folder, os.W_OK | os.X_OK) else None


def _version_of(module: str) -> str | None:
    """Return the version of an installed module, without importing it; None if it is not installed."""
    try:
        if importlib.util.find_spec(module) is None:
            return None
    except ImportError:  # its import fails
        return None
    try:
        return importlib.metadata.version(_DISTRIBUTIONS.get(module, module))
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
