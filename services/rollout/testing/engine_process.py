"""A real rollout engine in its own process."""

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import tomli_w

from penstock.rpc.channel import connect
from penstock.runtime.children.parent_death import dying_with_parent
from penstock.v1 import common_pb2, generate_pb2, generate_pb2_grpc, rollout_pb2, rollout_pb2_grpc

START_TIMEOUT_S = 240.0
_ROOT = Path(__file__).parents[3]
_HAS_GPU = Path("/dev/nvidiactl").exists()


class Process(Protocol):
    """What tests use of `asyncio.subprocess.Process`."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def send_signal(self, signal: int) -> None: ...

    def kill(self) -> None: ...


class _Forked:
    """A process that the forker has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def returncode(self) -> int | None:
        return self.code.result() if self.code.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self.code)

    def send_signal(self, signal: int) -> None:
        if not self.code.done():
            os.kill(self.pid, signal)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class EngineForker:
    """The process that forks engines during `forking_engines`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._forked = asyncio.Queue[_Forked]()
        self._running = dict[int, _Forked]()
        self._reading = asyncio.create_task(self._read())

    async def fork(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
        """Fork `penstock ARGUMENTS` with exactly this environment."""
        assert self._process.stdin is not None
        request = {"arguments": arguments, "environment": dict(environment), "log": str(log)}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        async with asyncio.timeout(START_TIMEOUT_S):
            return await self._forked.get()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            if (pid := answer.get("forked")) is not None:
                self._running[pid] = _Forked(pid)
                self._forked.put_nowait(self._running[pid])
            else:
                self._running.pop(answer["ended"]).code.set_result(answer["code"])

    async def close(self) -> None:
        """End it, and any engine that is left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._reading


_forker: EngineForker | None = None


@asynccontextmanager
async def forking_engines() -> AsyncIterator[None]:
    """Have `engine_process` fork its engines during the context, for their import of SGLang; not with a GPU."""
    global _forker
    if _HAS_GPU:
        yield
        return
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "ignore", "-m", "services.rollout.testing.engine_forker",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=_ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"}, preexec_fn=dying_with_parent(),
    )  # fmt: skip
    _forker = EngineForker(process)
    try:
        yield
    finally:
        forker, _forker = _forker, None
        await forker.close()


class EngineProcess:
    """A running `penstock serve rollout`."""

    def __init__(self, process: Process, address: str, log: Path, scratch: Path) -> None:
        self.process = process
        self.log = log
        self.scratch = scratch
        """The engine's TMPDIR."""
        self.channel = connect(address)
        self.generation = generate_pb2_grpc.GenerateServiceStub(self.channel)
        self.control = rollout_pb2_grpc.RolloutServiceStub(self.channel)

    async def replica(self) -> common_pb2.Replica:
        """Return the engine's current description of itself."""
        return (await self.control.GetReplica(rollout_pb2.GetReplicaRequest(), timeout=20)).replica

    async def generate(self, request: generate_pb2.GenerateRequest) -> generate_pb2.GenerateResponse:
        """Play the turn."""
        answer: generate_pb2.GenerateResponse = await self.generation.Generate(request, timeout=120)
        return answer


@asynccontextmanager
async def engine_process(
    model_path: Path,
    nats_url: str,
    folder: Path,
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
    run: str = "",
    grace_s: float = 5.0,
    lease_ttl_s: float = 5.0,
    is_measured: bool = False,
    trainer: Mapping[str, object] = MappingProxyType({}),
    **rollout: object,
) -> AsyncIterator[EngineProcess]:
    """Run an engine during the context.

    Args:
        model_path: The engine's model.
        nats_url: The engine's bus.
        folder: Folder for its recipe and log.
        environment: Additional variables; with any, it is not forked.
        run: Name of its run; by default the folder's.
        grace_s: `run.grace_s`, in seconds.
        lease_ttl_s: `bus.lease_ttl_s`, in seconds.
        is_measured: Whether it serves metrics, on any free port, and SGLang measures its own.
        trainer: Settings of the section `trainer` that engines follow.
        rollout: Settings of the section `rollout`.
    """
    recipe, log = folder / "recipe.toml", folder / "engine.log"
    metrics = {"port": 0} if is_measured else {}
    settings = tomli_w.dumps({"rollout": rollout, "trainer": dict(trainer), "metrics": metrics})
    recipe.write_text(
        f'[run]\nname = "{run or folder.name}"\ngrace_s = {grace_s}\n'
        f'[bus]\nurl = "{nats_url}"\nlease_ttl_s = {lease_ttl_s}\n[model]\npath = "{model_path}"\n'
        f'[log]\nformat = "json"\nlevel = "debug"\n{settings}'
    )
    log.write_bytes(b"")
    # Killed engines leave temporary files. Socket paths must be short, so they cannot be in `folder`.
    scratch = tempfile.TemporaryDirectory(prefix="engine-", ignore_cleanup_errors=True)
    process = await _start(
        ["serve", "rollout", "--config", str(recipe)],
        {**os.environ, "HF_HUB_OFFLINE": "1", "TMPDIR": scratch.name, **environment},
        log,
        forker=None if environment else _forker,
    )
    try:
        engine = EngineProcess(process, await _address(process, log), log, Path(scratch.name))
        yield engine
        await engine.channel.close(None)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), timeout=30)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
        finally:
            scratch.cleanup()


async def _start(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path, *, forker: EngineForker | None
) -> Process:
    if forker is not None:
        return await forker.fork(arguments, environment, log)
    with log.open("wb") as output:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-W", "ignore", "-m", "services.cli", *arguments,
            stdout=output, stderr=output, start_new_session=True, cwd=_ROOT,
            env=environment, preexec_fn=dying_with_parent(),
        )  # fmt: skip


async def _address(process: Process, log: Path) -> str:
    async with asyncio.timeout(START_TIMEOUT_S):
        while process.returncode is None:
            for event in log_events(log):
                if event["event"] == "engine.serving":
                    return str(event["address"])
            await asyncio.sleep(0.1)
    raise AssertionError(f"the engine ended with {process.returncode}:\n{_end_of(log)}")


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]


def log_events(log: Path) -> list[dict[str, object]]:
    """Return the engine's log so far."""
    return [json.loads(line) for line in log.read_text(errors="replace").splitlines() if line.startswith("{")]
