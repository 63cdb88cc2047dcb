"""A real rollout engine in its own process."""

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import tomli_w

from penstock.rpc.channel import connect
from penstock.runtime.parent_death import dying_with_parent
from penstock.v1 import common_pb2, generate_pb2_grpc, rollout_pb2, rollout_pb2_grpc

START_TIMEOUT_S = 240.0
_ROOT = Path(__file__).parents[2]


class EngineProcess:
    """A running `penstock serve rollout`."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, log: Path, scratch: Path) -> None:
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


@asynccontextmanager
async def engine_process(
    model_path: Path,
    nats_url: str,
    folder: Path,
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
    run: str = "",
    grace_s: float = 5.0,
    trainer: Mapping[str, object] = MappingProxyType({}),
    **rollout: object,
) -> AsyncIterator[EngineProcess]:
    """Run an engine during the context.

    Args:
        model_path: The engine's model.
        nats_url: The engine's bus.
        folder: Folder for its recipe and log.
        environment: Additional variables.
        run: Name of its run; by default the folder's.
        grace_s: `run.grace_s`, in seconds.
        trainer: Settings of the section `trainer` that engines follow.
        rollout: Settings of the section `rollout`.
    """
    recipe, log = folder / "recipe.toml", folder / "engine.log"
    settings = tomli_w.dumps({"rollout": rollout, "trainer": dict(trainer)})
    recipe.write_text(
        f'[run]\nname = "{run or folder.name}"\ngrace_s = {grace_s}\n'
        f'[bus]\nurl = "{nats_url}"\n[model]\npath = "{model_path}"\n'
        f'[log]\nformat = "json"\nlevel = "debug"\n{settings}'
    )
    # Killed engines leave temporary files. Socket paths must be short, so they cannot be in `folder`.
    scratch = tempfile.TemporaryDirectory(prefix="engine-", ignore_cleanup_errors=True)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-W", "ignore", "-m", "services.cli", "serve", "rollout", "--config", str(recipe),
            stdout=output, stderr=output, start_new_session=True, cwd=_ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TMPDIR": scratch.name, **environment},
            preexec_fn=dying_with_parent(),
        )  # fmt: skip
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


async def _address(process: asyncio.subprocess.Process, log: Path) -> str:
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
