"""The trainer's side of a push to one real engine, stage by stage."""

import asyncio
import os
from collections.abc import Mapping

import grpc
import torch

from penstock.v1 import common_pb2, rollout_pb2
from penstock.weights.digest import XXH3, tensor_digest
from penstock.weights.manifest import Manifest, pack, specs_of
from services.rollout.testing.engine_process import EngineProcess
from services.trainer.weight_sync.process_group import WeightProcessGroup


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
        replaces_newer: bool = False,
    ) -> None:
        self.engine = engine
        self.weights = weights
        self.version = version
        self.mode, self.drain_s = mode, drain_s
        self.replaces_newer = replaces_newer
        self.push_id = f"push-{version}-{os.urandom(4).hex()}"
        self.manifest = Manifest.plan(specs_of(weights), max_bucket_bytes=bucket_bytes)

    async def prepare(self, group: "tuple[WeightProcessGroup, rollout_pb2.BroadcastSource] | None" = None) -> None:
        """Form a group, or use `group`."""
        opening = None
        if group is None:
            world_size = 1 + (await self.engine.replica()).num_ranks
            self.group = await asyncio.to_thread(self._listen, world_size)
            self.message = rollout_pb2.BroadcastSource(
                group_name=self.group.name,
                master_host="127.0.0.1",
                master_port=self.group.port,
                rank_offset=1,
                world_size=world_size,
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
            replaces_newer=self.replaces_newer,
        )
        try:
            await self.engine.control.PrepareWeights(request, timeout=60)
        except grpc.aio.AioRpcError:
            if opening is not None:  # else the engine, if it comes late, waits for this member for minutes
                await asyncio.to_thread(self.group.close)
                await asyncio.gather(opening, return_exceptions=True)
            raise
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
        await self.engine.control.PrepareWeights(request, timeout=60)

    async def receive_only(self) -> None:
        """Ask for the buckets without sending any."""
        await self.engine.control.ReceiveWeights(rollout_pb2.ReceiveWeightsRequest(push_id=self.push_id), timeout=60)

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
        await receiving

    async def commit(self) -> None:
        """Prove every parameter, make the version current, and let generation go on."""
        digests = {name: tensor_digest(tensor, XXH3) for name, tensor in self.weights.items()}
        request = rollout_pb2.CommitWeightsRequest(push_id=self.push_id, digests=digests)
        await self.engine.control.CommitWeights(request, timeout=60)

    async def abort(self, reason: str) -> common_pb2.ReplicaState.ValueType:
        """Give up."""
        request = rollout_pb2.AbortWeightsRequest(push_id=self.push_id, reason=reason)
        return (await self.engine.control.AbortWeights(request, timeout=60)).state

    async def complete(self) -> None:
        """All stages, and leave the group."""
        await self.prepare()
        await self.finish()

    async def finish(self) -> None:
        """All stages after `prepare`, and leave the group."""
        await self.pause()
        await self.deliver()

    async def deliver(self) -> None:
        """All stages after `pause`, and leave the group."""
        try:
            for stage in (self.transfer, self.commit):
                await stage()
        finally:
            await asyncio.to_thread(self.group.close)

    async def break_off(self) -> None:
        """Send the first bucket of several and vanish; raises what the engine says of it."""
        receiving = asyncio.ensure_future(self.receive_only())
        await asyncio.to_thread(self.group.broadcast, [pack(self.manifest.buckets[0], self.weights)], timeout_s=30)
        await asyncio.to_thread(self.group.close)
        await receiving

    def _listen(self, world_size: int) -> WeightProcessGroup:
        return WeightProcessGroup.listen(
            host="127.0.0.1", name=f"group-{self.push_id}", world_size=world_size, backend="gloo"
        )

    def _broadcast(self) -> None:
        self.group.broadcast((pack(bucket, self.weights) for bucket in self.manifest.buckets), timeout_s=30)
