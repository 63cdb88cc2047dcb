"""Pools of engines that divide a model in different ways: whichever way a push takes, what it makes of all is the
trainer's model. Not collected by default: `make test-families`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import torch

from penstock.bus.connection import connect
from penstock.config import BusConfig
from penstock.v1 import common_pb2
from penstock.weights.named_weights import NamedWeights
from services.rollout.testing.engine_process import EngineProcess, engine_process, log_events
from tests.support.engine.family import FELT, MOST, Plays, difference
from tests.support.engine.pd_pairs import Pair, missing_for_pairs
from tests.support.engine.publisher import engine_publisher
from tests.support.engine.push import Push
from tests.support.engine.reference import Reference, until_replica
from tests.support.trainer.families import heard_in_engines, write_model
from tests.support.weights.publishing import kept_current, watching

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("rendezvous", "engine_forker"),
    pytest.mark.leaves_behind("transformers' progress bar keeps a thread", "thread"),
    pytest.mark.leaves_behind("SGLang leaves the files of its sockets in TMPDIR", "file"),
]

Settings = Mapping[str, object]
Fault = tuple[str, Callable[[torch.Tensor], torch.Tensor]]

LAYERS: Settings = {"tensor_parallel": 2}
"""Two processes have half of each layer."""
EXPERTS: Settings = {"tensor_parallel": 2, "expert_parallel": 2}
"""Two processes have half of each layer, and of a mixture's experts each has three as wholes."""
PAIR: Sequence[Settings] = [{**EXPERTS, "role": role, "transfer_backend": "nixl"} for role in ("prefill", "decode")]
"""Two engines of two processes each."""
SECTIONS = (32, 32, 64)
"""Channels of queries, of keys and of values; each process has half of each."""
WAYS = ("broadcast", "shared_memory", "disk", "delta", "delta")
"""How a push reaches engines that are there."""


def exchanged(weight: torch.Tensor, *sizes: int) -> torch.Tensor:
    """What two processes hold of each section, the one's in place of the other's."""
    sections = weight.split(sizes or [len(weight)])
    return torch.cat([section.roll(len(section) // 2, 0) for section in sections])


def exchanged_columns(weight: torch.Tensor) -> torch.Tensor:
    """The same of columns."""
    return exchanged(weight.T).T.contiguous()


LINEAR_FAULTS: dict[str, Fault] = {
    "a convolution in other sections": ("linear_attn.conv1d.weight", lambda weight: weight.roll(32, dims=0)),
    "halves of a convolution as one section": ("linear_attn.conv1d.weight", exchanged),
    "the other process's convolution": ("linear_attn.conv1d.weight", lambda weight: exchanged(weight, *SECTIONS)),
    "the other process's heads": ("linear_attn.in_proj_qkv.weight", lambda weight: exchanged(weight, *SECTIONS)),
    "the other process's gates": ("linear_attn.in_proj_z.weight", exchanged),
    "the other process's share of tokens": ("linear_attn.in_proj_b.weight", exchanged),
    "the other process's decays": ("linear_attn.A_log", exchanged),
    "the other process's outputs": ("linear_attn.out_proj.weight", exchanged_columns),
}
EXPERT_FAULTS: dict[str, Fault] = {
    "the other process's experts": ("mlp.experts.gate_up_proj", exchanged),
    "the other process's outputs of experts": ("mlp.experts.down_proj", exchanged),
    "the next expert's outputs": ("mlp.experts.down_proj", lambda weight: weight.roll(1, dims=0)),
    "gates as values": ("mlp.experts.gate_up_proj", lambda weight: weight.roll(weight.shape[1] // 2, dims=1)),
    "a router of the other process's experts": ("mlp.gate.weight", exchanged),
    "the other process's heads": ("self_attn.o_proj.weight", exchanged_columns),
}
"""Each in one parameter of one layer: exchanged in all of them, processes would still compute the same."""


@asynccontextmanager
async def engines_that_join(
    model: Path, nats_url: str, folder: Path, pool: Sequence[Settings]
) -> AsyncIterator[list[EngineProcess]]:
    """One of each settings, in one run."""
    async with AsyncExitStack() as stack:
        engines = []
        for number, own in enumerate(pool):
            place = folder / f"engine-{number}"
            place.mkdir()
            settings = {"max_running": 8, "context_length": 512, **own}
            process = engine_process(model, nats_url, place, run=folder.name, grace_s=1.0, lease_ttl_s=30.0, **settings)
            engines.append(await stack.enter_async_context(process))
        yield engines


async def require_same(engines: Sequence[EngineProcess], policy: Reference, version: int) -> None:
    """All engines have the policy as this version, a pair's together."""
    unified: list[EngineProcess] = []
    peers: list[EngineProcess] = []
    for engine in engines:
        replica = await until_replica(
            engine,
            lambda replica: (replica.policy_version, replica.state) == (version, common_pb2.REPLICA_STATE_READY),
            timeout_s=60,
        )
        (unified if replica.role == common_pb2.REPLICA_ROLE_UNIFIED else peers).append(engine)
    players: list[Plays] = [*unified]
    if peers:
        prefill, decode = peers
        players.append(Pair(prefill, decode, policy))
    for player in players:
        assert await difference(player, policy) <= MOST


@pytest.mark.parametrize(
    ("kind", "pool", "faults"),
    [
        pytest.param("qwen3_5", [{}, LAYERS], LINEAR_FAULTS, id="qwen3_5"),
        pytest.param("qwen3_moe", [{}, EXPERTS, LAYERS], EXPERT_FAULTS, id="qwen3_moe"),
        pytest.param("qwen3_vl_moe", [{}, EXPERTS, *PAIR], EXPERT_FAULTS, id="qwen3_vl_moe"),
    ],
)
async def test_engines_of_one_process_and_of_two_take_each_push(
    kind: str, pool: Sequence[Settings], faults: Mapping[str, Fault], nats_url: str, tmp_path: Path
) -> None:
    """Published before they were there, and in every way since. Parts that are exchanged would be noticed."""
    if any("role" in settings for settings in pool) and (missing := await asyncio.to_thread(missing_for_pairs, "nixl")):
        pytest.fail(missing)
    model = write_model(heard_in_engines(kind), tmp_path / kind)
    policies = [Reference(model)]
    policies += [policies[0].perturbed(seed) for seed in range(1, 2 + len(WAYS))]
    async with AsyncExitStack() as stack:
        config = BusConfig(url=nats_url, lease_ttl_s=30.0)  # it does not lapse while the machine is busy
        bus = await stack.enter_async_context(connect(config, run=tmp_path.name))
        watch = await stack.enter_async_context(watching(bus))
        joined = engine_publisher(watch, files_dir=tmp_path / "weights", transport="broadcast")
        first = await stack.enter_async_context(joined)
        await first.publish(first.take(1, NamedWeights.of(policies[1].weights)))
        async with kept_current(first):
            engines = await stack.enter_async_context(engines_that_join(model, nats_url, tmp_path, pool))
            await require_same(engines, policies[1], 1)
        folders = {"disk": tmp_path / "pushed"}
        publishers = {
            way: await stack.enter_async_context(engine_publisher(watch, files_dir=folders.get(way), transport=way))
            for way in dict.fromkeys(WAYS)
        }
        for version, way in enumerate(WAYS, start=2):
            weights = NamedWeights.of(policies[version].weights)
            report = await publishers[way].publish(publishers[way].take(version, weights))
            assert (report.num_replicas, report.num_failed) == (len(engines), 0)
            await require_same(engines, policies[version], version)
        for engine in engines:
            received = [event["transport"] for event in log_events(engine.log) if event["event"] == "weights.received"]
            assert received == ["disk", *WAYS]
        newest, version = policies[-1], len(WAYS) + 1
        for number, (what, (name, fault)) in enumerate(faults.items(), start=1):
            pushed = newest.weights
            [full] = [each for each in pushed if each.endswith(f"layers.1.{name}")]
            pushed[full] = fault(pushed[full])
            await Push(engines[1], pushed, version + number).complete()
            assert await difference(engines[1], newest) > FELT, what
