"""Compiled layers and head take the same step. Kernels are not made: torch's compiler only traces here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen as torch_varlen

from penstock.errors import ConfigError
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.base import take_step
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.backend.policy import compiled, logprobs, varlen
from services.trainer.batching.sequences import TrainGroup
from services.trainer.config import TrainerConfig
from tests.support.trainer import varlen_on_cpu
from tests.support.trainer.families import random_qwen3_vl_moe, write_model
from tests.support.trainer.read_groups import groups_with_pictures

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own


@pytest.fixture(autouse=True)
def _traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels, and with a head in several chunks."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr(logprobs, "COMPILED_CHUNK_TOKENS", 16)
    monkeypatch.setattr(logprobs, "CHUNK_IDS", 200)


@pytest.fixture(scope="module")
def groups(tiny_model_path: Path) -> list[TrainGroup]:
    """Three with a picture, whose rows differ in length."""
    rewards = [(1.0, 0.0), (1.0, 0.0, 0.0, 1.0), (0.0, 1.0)]
    return groups_with_pictures(tiny_model_path, rewards=rewards, versions=[1] * 3)


def backend_of(path: Path, **settings: object) -> InProcessBackend:
    """One on the CPU."""
    config = TrainerConfig.model_validate({"device": "cpu", "optimizer": {"learning_rate": 1e-3}, **settings})
    algorithm = AlgorithmConfig.model_validate({"kl": {"kind": "k3", "coef": 0.1}})
    backend = InProcessBackend(path, config, algorithm, seed=0, temperature=0.7)
    backend.load(None)
    return backend


@pytest.mark.variant
def test_a_compiled_step_is_the_same(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """In loss, gradient norm and weights, with recomputed activations and a reference policy; and what the first step
    has compiled serves rows of other lengths.
    """
    found = {}
    for compiles in (False, True):
        backend = backend_of(tiny_model_path, compile=compiles, gradient_checkpointing=True, micro_batch_tokens=200)
        metrics = [take_step(backend, [groups[:2]], 1)]
        num_compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        metrics.append(take_step(backend, [groups], 2))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_compiled
        assert (num_compiled > 0) is compiles
        found[compiles] = metrics, {name: weight.clone() for name, weight in backend.export()}
    for ours, plain in zip(found[True][0], found[False][0], strict=True):
        assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
    for name, weight in found[True][1].items():
        torch.testing.assert_close(weight, found[False][1][name], rtol=0, atol=2e-5, msg=name)


@pytest.mark.slow
def test_layers_of_a_gpu_are_compiled_whole(
    tiny_model_path: Path, groups: list[TrainGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention included, so that the host starts a layer in one piece; rows of other lengths and numbers of pictures
    are served by what the first step has compiled; and the step is the same.
    """
    monkeypatch.setattr(varlen, "is_usable_for", lambda _: True)
    monkeypatch.setattr(torch_varlen, "varlen_attn", varlen_on_cpu.varlen_attn)
    found = {}
    for compiles in (False, True):
        backend = backend_of(tiny_model_path, compile=compiles, micro_batch_tokens=200)
        metrics = [take_step(backend, [groups[:2]], 1)]
        num_compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        metrics += [take_step(backend, [groups], 2), take_step(backend, [groups[2:]], 3)]
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_compiled
        assert (num_compiled > 0) is compiles
        found[compiles] = metrics
    assert not torch._dynamo.utils.counters["graph_break"]
    for ours, plain in zip(found[True], found[False], strict=True):
        assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)


def test_a_mixture_is_not_compiled(tmp_path: Path) -> None:
    """Its products depend on what the routers choose."""
    path = write_model(random_qwen3_vl_moe(), tmp_path / "model")
    with pytest.raises(ConfigError, match=r"trainer\.compile = true does not go with mixtures"):
        backend_of(path, compile=True)


@pytest.mark.parametrize("other", [{"ranks": 2}, {"lora": {"rank": 4}}], ids=["ranks", "adapters"])
def test_what_it_does_not_go_with_yet(other: dict[str, Any]) -> None:
    """Said before anything starts."""
    with pytest.raises(ValueError, match=f"compile = true does not go with {next(iter(other))}"):
        TrainerConfig.model_validate({"compile": True, **other})
