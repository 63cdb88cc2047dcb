"""`penstock train` for five steps with a tiny random model of every family. Not collected: `make test-families`.

Two ranks train, with a mixture's experts divided among them, and a real SGLang engine takes five pushes.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from penstock.config import load
from penstock.model.families.experts import num_experts
from penstock.model.tokens import image_token_id
from penstock.runtime.ports import free_ports
from penstock.testing.tolerance import MAX_DLOGP
from penstock.testing.train_process import RECIPE, TrainProcess, started
from services.cli import main
from services.recipe import Recipe
from services.rollout.testing.engine_process import engine_process
from services.trainer.backend.base import take_step
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.batching.sequences import open_reader
from services.trainer.data.geometry import GeometryDataset
from services.trainer.replay.recording import read_recording
from tests.conftest import ROOT
from tests.support.engine.family import FELT, MOST, difference, engine_of
from tests.support.engine.reference import Reference
from tests.support.trainer.checkpoints import tensors_of
from tests.support.trainer.families import (
    FAMILIES,
    FULL_FAMILIES,
    LINEAR_FAMILIES,
    MIXTURES,
    heard_in_engines,
    write_model,
)

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(900)]

NUM_STEPS = 5


def write_rows(path: Path, *, with_images: bool) -> None:
    """Drawn problems with their pictures, if the model takes any, and texts."""
    drawn = GeometryDataset(8, seed=5)
    rows = [drawn[number] for number in range(8)]
    for number, row in enumerate(rows):
        if number % 4 == 3 or not with_images:
            row |= {"images": [], "problem": row["problem"].replace("<image>", "")}
    pq.write_table(pa.Table.from_pylist(rows), path)


def exchange_halves(tensor: torch.Tensor) -> None:
    """Exchange what two ranks hold of a weight."""
    tensor.copy_(torch.cat([*reversed(tensor.chunk(2))]))


def permute_experts(tensor: torch.Tensor) -> None:
    """Give every expert's place to the next."""
    tensor.copy_(tensor.roll(1, dims=0))


def faulty(model: Any, name: str, fault: Callable[[torch.Tensor], None]) -> Any:
    """The model with a fault in one layer's weight."""
    weights = [(each, parameter) for each, parameter in model.named_parameters() if each.endswith(f"layers.1.{name}")]
    [(_, weight)] = weights
    with torch.no_grad():
        fault(weight)
    return model


@contextmanager
def five_steps_of(folder: Path, model: Path, **further: object) -> Iterator[TrainProcess]:
    """A run of five steps that has ended: two ranks have pushed each to an engine, and the two agreed in every step."""
    write_rows(folder / "rows.parquet", with_images=image_token_id(model) is not None)
    overrides = {
        "model.path": model,
        "run.dir": folder / "runs",
        "data.path": folder / "rows.parquet",
        "data.environment": "drawn",
        "worker.agents.drawn.function": "tests.support.worker.drawn_rewards:play",
        "router.http_port": free_ports(1)[0],
        "rollout.replicas": 1,
        "trainer.ranks": 2,
        "trainer.expert_parallel": 2 if num_experts(model) else 1,
        "trainer.max_staleness": 0,
        "trainer.num_steps": NUM_STEPS,
        "trainer.groups_per_step": 4,
        "trainer.optimizer.warmup_steps": 0,
        "trainer.record_groups": "true",
        **further,
    }
    with started(folder, str(RECIPE), *(f"--{key}={value}" for key, value in overrides.items())) as train:
        assert train.wait(600) == 0, train.tail()
        rows = train.rows()
        assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
        for row in rows:
            assert row["grad_norm"] > 0, f"nothing was trained, so the test proves nothing: {row}"
            assert row["push_failed_replicas"] == 0
            assert row["push_replicas"] == 1
            assert row["dlogp_max"] <= MAX_DLOGP, row
        yield train


@pytest.mark.leaves_behind("transformers' progress bar keeps a thread", "thread")
@pytest.mark.parametrize("kind", FAMILIES)
async def test_five_steps_of_a_family(kind: str, nats_url: str, tmp_path: Path) -> None:
    """Engine and trainer agree in every step, the numbers feel faults, and SGLang loads what the ranks have saved."""

    def made() -> Any:
        return heard_in_engines(kind)

    model = write_model(made(), tmp_path / kind)
    with five_steps_of(tmp_path, model) as train:
        assert seen_by(train, model) <= MAX_DLOGP
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if num_experts(model) else []
        faults = [(name, permute_experts) for name in names]
        attention = "linear_attn.out_proj.weight" if kind in LINEAR_FAMILIES else "self_attn.o_proj.weight"
        faults += [(name, exchange_halves) for name in (*names, attention)]
        for number, (name, fault) in enumerate(faults):
            other = write_model(faulty(made(), name, fault), tmp_path / f"faulty {number}")
            assert seen_by(train, other) > FELT, f"{fault.__name__} of {name}"
        saved = train.folder / "checkpoints" / f"step-{NUM_STEPS:06d}" / "model"
        assert len(list(saved.glob("*.safetensors"))) > 1, "each rank writes files of its own"
    async with engine_of(saved, nats_url, tmp_path) as engine:
        trained = Reference(saved)
        assert await difference(engine, trained) <= MOST
        assert await difference(engine, Reference(model)) > FELT / 100


@pytest.mark.parametrize("kind", [*LINEAR_FAMILIES, "qwen3_vl", "qwen3_vl_moe"])
async def test_five_steps_with_an_engine_of_two_processes(kind: str, nats_url: str, tmp_path: Path) -> None:
    """It is started by hand, as `penstock train` starts none of several processes on a CPU, and has joined the run.
    It divides a mixture's experts as wholes, as the ranks do.
    """
    model = write_model(heard_in_engines(kind), tmp_path / kind)
    folder = tmp_path / "engine"
    folder.mkdir()
    settings = {"tensor_parallel": 2, "max_running": 8, "context_length": 512}
    settings["expert_parallel"] = 2 if num_experts(model) else 1
    async with engine_process(model, nats_url, folder, run=tmp_path.name, grace_s=2.0, lease_ttl_s=30.0, **settings):
        of_bus = {"bus.url": nats_url, "bus.lease_ttl_s": 30.0, "run.name": tmp_path.name}
        with five_steps_of(tmp_path, model, **of_bus, **{"rollout.replicas": 0, "rollout.context_length": 512}):
            pass


@pytest.mark.leaves_behind("transformers' progress bar keeps a thread", "thread")
@pytest.mark.parametrize("kind", FULL_FAMILIES)
async def test_five_steps_of_adapters(kind: str, nats_url: str, tmp_path: Path) -> None:
    """Of every linear layer. Engine and trainer agree in every step, and SGLang loads what `penstock export` merges."""
    model = write_model(heard_in_engines(kind), tmp_path / kind)
    settings = {
        "trainer.lora.rank": 3,
        "trainer.lora.alpha": 6,
        "trainer.lora.targets": '["*"]',
        "trainer.optimizer.learning_rate": 1e-2,
    }
    with five_steps_of(tmp_path, model, **settings) as train:
        newest = train.folder / "checkpoints" / f"step-{NUM_STEPS:06d}"
        size_bytes = sum(tensor.nbytes for tensor in tensors_of(newest / "adapter").values())
        assert {row["push_bytes"] for row in train.rows()} == {size_bytes}
        assert main(["export", str(train.folder), str(tmp_path / "exported"), "--dtype=float32"]) == 0
    async with engine_of(tmp_path / "exported", nats_url, tmp_path) as engine:
        assert await difference(engine, Reference(tmp_path / "exported")) <= MOST
        assert await difference(engine, Reference(model)) > FELT / 100


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_run_replays_the_routing_of_its_engine(kind: str, tmp_path: Path) -> None:
    """Of every token that it computes; and `penstock replay` computes the step again, bit for bit.

    The entropy bonus teaches all samples: a random model's answers are all wrong.
    """
    model = write_model(heard_in_engines(kind), tmp_path / kind)
    write_rows(tmp_path / "rows.parquet", with_images=image_token_id(model) is not None)
    overrides = {
        "model.path": model,
        "run.dir": tmp_path / "runs",
        "data.path": tmp_path / "rows.parquet",
        "algorithm.entropy.kind": "bonus",
        "rollout.replicas": 1,
        "trainer.router_replay": "true",
        "trainer.max_staleness": 0,
        "trainer.num_steps": 2,
        "trainer.groups_per_step": 4,
        "trainer.optimizer.warmup_steps": 0,
        "trainer.record_groups": "true",
    }
    with started(tmp_path, str(RECIPE), *(f"--{key}={value}" for key, value in overrides.items())) as train:
        assert train.wait(600) == 0, train.tail()
        rows = train.rows()
        assert [row["step"] for row in rows] == [1, 2]
        for row in rows:
            assert row["grad_norm"] > 0, f"nothing was trained, so the test proves nothing: {row}"
            assert row["replayed_token_fraction"] == 1, row
            assert row["dlogp_max"] <= MAX_DLOGP, row
        replay = [sys.executable, "-m", "services.cli", "replay", str(train.folder), "--step", "1"]
        shown = subprocess.run(replay, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
        assert shown.returncode == 0, shown.stdout + shown.stderr


@pytest.mark.parametrize("kind", LINEAR_FAMILIES)
def test_a_step_of_linear_attention_is_computed_again(kind: str, tmp_path: Path) -> None:
    """By `penstock replay`, bit for bit, from what a run on one rank has recorded."""
    model = write_model(heard_in_engines(kind), tmp_path / kind)
    with five_steps_of(tmp_path, model, **{"trainer.ranks": 1}) as train:
        replay = [sys.executable, "-m", "services.cli", "replay", str(train.folder), "--step", "3"]
        shown = subprocess.run(replay, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
        assert shown.returncode == 0, shown.stdout + shown.stderr


def seen_by(train: TrainProcess, model: Path) -> float:
    """The largest |dlogp| of the first step's tokens, between the engine and a trainer that begins with this model."""
    recipe = load(Recipe, [train.folder / "config.toml"])
    backend = InProcessBackend(
        model, recipe.trainer, recipe.algorithm, seed=recipe.run.seed, temperature=recipe.sampling.temperature
    )
    backend.load(None)
    recording = read_recording(train.folder / "groups", 1)
    reader = open_reader(model)
    metrics = take_step(backend, [[reader.read(group, recording.images) for group in recording.groups]], 1)
    return metrics["dlogp_max"]
