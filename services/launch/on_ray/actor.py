"""The actor that starts one process of a run on the host where Ray has placed it, and watches and ends it there.

It uses the local backend of its host, so that a process is the same everywhere. If the actor dies in any way, so does
the process with all that it started.
"""

import asyncio
import dataclasses
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from services.launch.gpu_plan import find_gpus
from services.launch.on_ray.environment import GIVEN
from services.launch.on_ray.working_folder import working_folder
from services.launch.process.bounded_log import BoundedLog
from services.launch.process.local import LocalProcess, local_backend
from services.launch.process.spec import ProcessSpec, StopPhase

ResultT = TypeVar("ResultT")

_CHUNK_BYTES: Final = 2**20
_MAX_LOG_BYTES: Final = 64 * 2**20
"""Of the copy on this host; the launcher keeps the log."""
_ON_CPU: Final = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
"""Several processes whose OpenMP threads wait for each other on few cores nearly stall."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the launcher asks an actor to start."""

    name: str
    command: Sequence[str]
    """As on the launcher's host."""
    replaced: Mapping[str, str]
    """Arguments of the command that are paths on the launcher's host, and what each is: python, recipe or error."""
    environment: Mapping[str, str]
    """Variables that the launcher gives to every process."""
    defaults: Mapping[str, str]
    """Variables for hosts that do not set them themselves."""
    port: int
    """Port on which the process serves; 0: any free one."""
    port_key: str
    """The setting that holds the port; empty: the command has it."""
    takes_host: bool
    """Whether the process is told its host's address, on which it listens."""
    advertises_only: bool
    """Whether the recipe says where it listens, so that it only tells others its host's address."""
    recipe_text: str
    folder: str
    """The launcher's working directory."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What the launcher learns of a process that was started."""

    address: str
    """host:port on which it serves."""
    host: str
    """Address of its host."""
    node_id: str
    """Its host's id in the cluster."""
    pid: int


class ProcessActor:
    """Starts, watches and ends one process; its methods may be called from several threads.

    None is a coroutine: Ray would then call all of them in one event loop, which `wait` would block.
    """

    def __init__(self) -> None:
        """Start the event loop in which the process is watched: Ray's own may be one that cannot start processes."""
        asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
        self._loop = asyncio.SelectorEventLoop()
        self._stack = AsyncExitStack()
        self._scratch = Path(tempfile.mkdtemp(prefix="penstock-"))
        self._log = BoundedLog(self._scratch / "output.log")
        self._num_read = 0
        self._process: LocalProcess | None = None
        threading.Thread(target=self._loop.run_forever, name="process", daemon=True).start()

    def start(self, order: Order) -> Started:
        """Start the process."""
        import ray  # only actors need it, and they run in a process of Ray's

        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        host, node_id = ray.util.get_node_ip_address(), context.get_node_id()
        recipe_file = self._scratch / "live.toml"
        recipe_file.write_text(order.recipe_text, encoding="utf-8")
        own = {"python": sys.executable, "recipe": str(recipe_file), "error": str(self._error_file)}
        command = [
            own[order.replaced[argument]] if argument in order.replaced else argument for argument in order.command
        ]
        if order.takes_host:
            command.append(f"--network.advertise_host={host}")
            if not order.advertises_only:
                command.append(f"--network.host={host}")
        os.chdir(working_folder(order.folder))
        spec = ProcessSpec(
            name=order.name,
            command=command,
            environment=environment_of(order, os.environ, gpus=gpus),
            phase=StopPhase.WORK,
            address=f"{host}:{order.port}",
            port_key=order.port_key,
        )
        self._process = self._run(_started(spec, self._log, self._stack, host=host))
        return Started(address=self._process.address, host=host, node_id=node_id, pid=self._process.pid)

    def wait(self) -> tuple[int, str | None]:
        """Wait for the end of the process; return its exit code and the content of its error file, if it wrote one."""
        assert self._process is not None
        ending = self._run(self._process.wait())
        with suppress(OSError):
            return ending.code, self._error_file.read_text()
        return ending.code, None

    def read(self) -> bytes:
        """Return the next part of what the process has written; empty if there is no more at the moment."""
        with suppress(FileNotFoundError), self._log.path.open("rb") as file:
            file.seek(self._num_read)
            chunk = file.read(_CHUNK_BYTES)
            self._num_read += len(chunk)
            if not chunk and self._num_read > _MAX_LOG_BYTES:
                os.truncate(self._log.path, 0)
                self._num_read = 0
            return chunk
        return b""

    def terminate(self) -> None:
        """Ask the process to end."""
        if self._process is not None:
            self._loop.call_soon_threadsafe(self._process.terminate)

    def kill(self) -> None:
        """Kill the process and everything that it started."""
        if self._process is not None:
            self._loop.call_soon_threadsafe(self._process.kill)

    def close(self) -> None:
        """Remove the process's files on this host, after its end."""
        self._run(self._stack.aclose())
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def _error_file(self) -> Path:
        return self._scratch / "error.json"

    def _run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _started(spec: ProcessSpec, log: BoundedLog, stack: AsyncExitStack, *, host: str) -> LocalProcess:
    backend = await stack.enter_async_context(local_backend(host=host))
    return await backend.start(spec, log, asyncio.Event())


def environment_of(order: Order, own: Mapping[str, str], *, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment of a process: its host's, with the launcher's variables and the GPUs that Ray gave it."""
    kept = {name: value for name, value in own.items() if not name.startswith(GIVEN)}
    if kept.get("OMP_NUM_THREADS") == "1":
        del kept["OMP_NUM_THREADS"]  # Ray set it, by the one CPU that stands for the process
    environment = {**order.defaults, **kept, **order.environment, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return environment if find_gpus({}) else {**_ON_CPU, **environment}
