"""A real rollout engine as a process of its own, for tests, and the trainer's side of a push to it."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import torch

from penstock.rpc.channel import connect
from penstock.runtime.parent_death import dying_with_parent
from penstock.v1 import common_pb2, generate_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from penstock.weights.digest import XXH3, tensor_digest
from penstock.weights.manifest import Manifest, pack
from services.trainer.weight_sync.process_group import WeightProcessGroup

START_TIMEOUT_S = 240.0
_ROOT = Path(__file__).parents[1]


class EngineProcess:
    """A running `penstock serve rollout`."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, log: Path) -> None:
        self.process = process
        self.log = log
        self.channel = connect(address)
        self.generation = generate_pb2_grpc.GenerateServiceStub(self.channel)
        self.control = rollout_pb2_grpc.RolloutServiceStub(self.channel)

    async def replica(self) -> common_pb2.Replica:
        """The engine as it describes itself now."""
        return (await self.control.GetReplica(rollout_pb2.GetReplicaRequest(), timeout=20)).replica


@asynccontextmanager
async def engine_process(
    model_path: Path,
    nats_url: str,
    folder: Path,
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
    **rollout: object,
) -> AsyncIterator[EngineProcess]:
    """Run an engine during the context; `rollout` are settings of its section."""
    recipe, log = folder / "recipe.toml", folder / "engine.log"
    settings = "".join(f"{name} = {json.dumps(value)}\n" for name, value in rollout.items())
    recipe.write_text(
        f'[run]\nname = "{folder.name}"\n[bus]\nurl = "{nats_url}"\n[model]\npath = "{model_path}"\n'
        f'[log]\nformat = "json"\nlevel = "debug"\n[rollout]\n{settings}'
    )
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-W", "ignore", "-m", "services.cli", "serve", "rollout", "--config", str(recipe),
            stdout=output, stderr=output, start_new_session=True, cwd=_ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **environment}, preexec_fn=dying_with_parent(),
        )  # fmt: skip
    try:
        engine = EngineProcess(process, await _address(process, log), log)
        yield engine
        await engine.channel.close()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), timeout=30)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise


async def _address(process: asyncio.subprocess.Process, log: Path) -> str:
    async with asyncio.timeout(START_TIMEOUT_S):
        while process.returncode is None:
            for event in log_events(log):
                if event["event"] == "engine.serving":
                    return str(event["address"])
            await asyncio.sleep(0.1)
    raise AssertionError(f"the engine ended with {process.returncode}:\n{log.read_text()[-4000:]}")


def log_events(log: Path) -> list[dict[str, object]]:
    """The engine's own log lines."""
    return [json.loads(line) for line in log.read_text(errors="replace").splitlines() if line.startswith("{")]


class Push:
    """The trainer's side of one push, stage by stage."""

    def __init__(
        self,
        engine: EngineProcess,
        weights: Mapping[str, torch.Tensor],
        version: int,
        *,
        bucket_bytes: int = 1 << 20,
        mode: rollout_pb2.PauseMode.ValueType = rollout_pb2.PAUSE_MODE_RETRACT,
        drain_s: float = 0.0,
    ) -> None:
        self.engine = engine
        self.weights = weights
        self.version = version
        self.mode, self.drain_s = mode, drain_s
        self.push_id = f"push-{version}-{os.urandom(4).hex()}"
        self.manifest = Manifest.plan(weights.items(), max_bucket_bytes=bucket_bytes)

    async def prepare(self, group: "tuple[WeightProcessGroup, rollout_pb2.BroadcastSource] | None" = None) -> None:
        """Form a group, or use `group`."""
        opening = None
        if group is None:
            self.group = await asyncio.to_thread(self._listen)
            self.message = rollout_pb2.BroadcastSource(
                group_name=self.group.name,
                master_host="127.0.0.1",
                master_port=self.group.port,
                rank_offset=1,
                world_size=2,
                backend="gloo",
            )
            opening = asyncio.create_task(asyncio.to_thread(self.group.form, timeout_s=30))
        else:
            self.group, self.message = group
        request = rollout_pb2.PrepareWeightsRequest(
            push_id=self.push_id,
            policy_version=self.version,
            broadcast=self.message,
            manifest=self.manifest.to_proto(),
            digest=XXH3,
            deadline_s=120.0,
        )
        await self.engine.control.PrepareWeights(request, timeout=60)
        if opening is not None:
            await opening

    async def prepare_only(self) -> None:
        """Announce a push whose group nobody will form: for one that must be refused before that."""
        group = rollout_pb2.BroadcastSource(
            group_name=self.push_id, master_host="127.0.0.1", master_port=1, rank_offset=1, world_size=2, backend="gloo"
        )
        request = rollout_pb2.PrepareWeightsRequest(
            push_id=self.push_id,
            policy_version=self.version,
            broadcast=group,
            manifest=self.manifest.to_proto(),
            digest=XXH3,
            deadline_s=120.0,
        )
        await self.engine.control.PrepareWeights(request, timeout=20)

    async def receive_only(self) -> None:
        """Ask for the buckets without sending any."""
        await self.engine.control.ReceiveWeights(rollout_pb2.ReceiveWeightsRequest(push_id=self.push_id), timeout=20)

    async def pause(self) -> None:
        """Stop generation."""
        request = rollout_pb2.PauseGenerationRequest(push_id=self.push_id, mode=self.mode, drain_s=self.drain_s)
        await self.engine.control.PauseGeneration(request, timeout=60 + self.drain_s)

    async def transfer(self) -> None:
        """Send all buckets."""
        receiving = asyncio.ensure_future(
            self.engine.control.ReceiveWeights(rollout_pb2.ReceiveWeightsRequest(push_id=self.push_id), timeout=60)
        )
        await asyncio.to_thread(self._broadcast)
        answer = await receiving
        assert (answer.num_tensors, answer.num_bytes) == (len(self.weights), self.manifest.num_bytes)

    async def verify(self) -> None:
        """Compare digests, name by name."""
        answer = await self.engine.control.VerifyWeights(
            rollout_pb2.VerifyWeightsRequest(push_id=self.push_id), timeout=60
        )
        assert dict(answer.digests) == {name: tensor_digest(tensor, XXH3) for name, tensor in self.weights.items()}

    async def commit(self) -> None:
        """Make the version current."""
        await self.engine.control.CommitWeights(rollout_pb2.CommitWeightsRequest(push_id=self.push_id), timeout=60)

    async def resume(self) -> None:
        """Let generation go on."""
        await self.engine.control.ResumeGeneration(
            rollout_pb2.ResumeGenerationRequest(push_id=self.push_id), timeout=60
        )

    async def abort(self, reason: str) -> common_pb2.ReplicaState.ValueType:
        """Give up."""
        request = rollout_pb2.AbortWeightsRequest(push_id=self.push_id, reason=reason)
        return (await self.engine.control.AbortWeights(request, timeout=60)).state

    async def complete(self) -> None:
        """All stages, and leave the group."""
        await self.prepare()
        try:
            for stage in (self.pause, self.transfer, self.verify, self.commit, self.resume):
                await stage()
        finally:
            await asyncio.to_thread(self.group.close)

    def _listen(self) -> WeightProcessGroup:
        return WeightProcessGroup.listen(host="127.0.0.1", name=f"group-{self.push_id}", world_size=2, backend="gloo")

    def _broadcast(self) -> None:
        self.group.broadcast((pack(bucket, self.weights) for bucket in self.manifest.buckets), timeout_s=30)
