"""How many ranks a trainer has."""

from pathlib import Path

import pydantic
import pytest

from penstock.errors import ConfigError
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.backend.ranks.start import is_follower, open_ranks, open_supervised_ranks, prepare_device
from services.trainer.checks.sequence_parallel import shares_heads
from services.trainer.config import BackendConfig, TrainerConfig
from tests.support.trainer.families import random_qwen3_vl_moe, write_model


def arguments(path: Path) -> dict[str, object]:
    """Of `InProcessBackend`."""
    config = BackendConfig(device="cpu")
    return {"model_path": path, "config": config, "algorithm": AlgorithmConfig(), "seed": 0, "temperature": 1.0}


def test_one_rank_is_the_trainer_alone(tiny_model_path: Path) -> None:
    """Nothing is started."""
    assert isinstance(open_ranks(arguments(tiny_model_path), num_ranks=1), InProcessBackend)
    assert not is_follower()


def started_by_torchrun(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Its variables, of the first of two ranks."""
    names = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**names, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **variables}.items():
        monkeypatch.setenv(name, value)


def test_torchrun_and_the_recipe_must_agree(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise some ranks would wait for others that never come."""
    started_by_torchrun(monkeypatch)
    with pytest.raises(ConfigError, match=r"trainer\.ranks = 3, but WORLD_SIZE is 2: .* leave trainer\.ranks out"):
        open_ranks(arguments(tiny_model_path), num_ranks=3)


def test_what_an_earlier_job_left_in_the_environment_is_named(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of torchrun's variables without the others, or no number; that of a job of one rank does not matter."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=r"WORLD_SIZE is 2, but RANK, LOCAL_RANK, .* are not set, .*; unset WORLD_SIZE"
    ):
        open_ranks(arguments(tiny_model_path), num_ranks=1)
    with pytest.raises(ConfigError, match="unset WORLD_SIZE"):
        is_follower()
    monkeypatch.setenv("WORLD_SIZE", "all")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'all', where torchrun sets a whole number"):
        open_ranks(arguments(tiny_model_path), num_ranks=1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "3")
    assert not is_follower()
    assert isinstance(open_ranks(arguments(tiny_model_path), num_ranks=1), InProcessBackend)


def test_ranks_without_a_gpu_each_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any of them starts."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"trainer\.ranks: 4 ranks of this machine need a GPU each, .* finds 2"):
        prepare_device("auto", local_rank=0, num_local=4)


def test_supervised_training_refuses_torchrun(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of training the same thing several times."""
    started_by_torchrun(monkeypatch)
    backend = {"model_path": tiny_model_path, "config": BackendConfig(device="cpu"), "seed": 0}
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 2, .* without torchrun, and set trainer\.ranks"):
        open_supervised_ranks(backend, num_ranks=1)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_ranks_that_cannot_be_divided_into_replicas_are_refused(tiny_model_path: Path, num_ranks: int) -> None:
    """By the setting, before any is started; the recipe alone knows it unless torchrun starts them."""
    with pytest.raises(
        ConfigError, match=rf"trainer\.hsdp_replicas = 3 does not divide the number of ranks, {num_ranks}"
    ):
        open_ranks(arguments(tiny_model_path) | {"hsdp_replicas": 3}, num_ranks=num_ranks)
    supervised = {"model_path": tiny_model_path, "config": BackendConfig(device="cpu"), "seed": 0, "hsdp_replicas": 3}
    with pytest.raises(ConfigError, match=r"trainer\.hsdp_replicas = 3 does not divide"):
        open_supervised_ranks(supervised, num_ranks=num_ranks)
    with pytest.raises(pydantic.ValidationError, match="hsdp_replicas = 3 does not divide ranks = 4"):
        TrainerConfig(ranks=4, hsdp_replicas=3)
    assert TrainerConfig(ranks=1, hsdp_replicas=3).num_shards == 1
    assert TrainerConfig(ranks=6, hsdp_replicas=3).num_shards == 2


def test_experts_that_ranks_cannot_divide_are_refused(tiny_model_path: Path, tmp_path: Path) -> None:
    """Before any rank is started, in both kinds of training."""
    mixture = arguments(write_model(random_qwen3_vl_moe(), tmp_path / "mixture"))
    with pytest.raises(ConfigError, match=r"trainer\.expert_parallel = 4 does not divide the model's 6 experts"):
        open_ranks(mixture | {"expert_parallel": 4}, num_ranks=4)
    with pytest.raises(ConfigError, match=r"trainer\.expert_parallel = 3 does not divide the trainer's ranks"):
        open_ranks(mixture | {"expert_parallel": 3}, num_ranks=2)
    with pytest.raises(ConfigError, match=r"trainer\.expert_parallel = 2 does not divide .* of which there is 1"):
        open_ranks(mixture | {"expert_parallel": 2}, num_ranks=1)
    dense = {"model_path": tiny_model_path, "config": BackendConfig(device="cpu"), "seed": 0}
    with pytest.raises(ConfigError, match=r"trainer\.expert_parallel = 2 is for mixtures of experts"):
        open_supervised_ranks(dense | {"expert_parallel": 2}, num_ranks=2)


def test_ranks_that_cannot_share_rows_are_refused(tiny_model_path: Path) -> None:
    """Before any is started, in both kinds of training: this model has 4 heads, and 2 of keys and values."""
    backend = arguments(tiny_model_path)
    heads = r"trainer\.sequence_parallel = 3 cannot share the model's 4 attention heads and 2 heads of keys and values"
    with pytest.raises(ConfigError, match=heads):
        open_ranks(backend | {"sequence_parallel": 3}, num_ranks=3)
    with pytest.raises(ConfigError, match=r"trainer\.sequence_parallel = 2 does not divide .* of which there are 3"):
        open_ranks(backend | {"sequence_parallel": 2}, num_ranks=3)
    supervised = {"model_path": tiny_model_path, "config": BackendConfig(device="cpu"), "seed": 0}
    with pytest.raises(ConfigError, match=r"trainer\.sequence_parallel = 2 does not divide .* of which there is 1"):
        open_supervised_ranks(supervised | {"sequence_parallel": 2}, num_ranks=1)
    with pytest.raises(pydantic.ValidationError, match="sequence_parallel = 3 does not divide ranks = 4"):
        TrainerConfig(ranks=4, sequence_parallel=3)


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "shares"),
    [(2, 4, 2, True), (4, 4, 2, True), (4, 8, 8, True), (6, 12, 4, False), (8, 4, 2, False), (3, 6, 6, True)],
)
def test_ranks_share_heads_evenly(size: int, heads: int, kv_heads: int, shares: bool) -> None:
    """Those of keys and values too, or each is repeated equally often."""
    assert shares_heads(size, heads, kv_heads) == shares


def test_expert_parallelism_does_not_go_with_replicas() -> None:
    """By both settings, when the recipe is read; with offload it does."""
    with pytest.raises(
        pydantic.ValidationError, match=r"expert_parallel = 2 does not go with hsdp_replicas = 2 yet; leave one of them"
    ):
        TrainerConfig(ranks=4, expert_parallel=2, hsdp_replicas=2)
    assert TrainerConfig.model_validate({"ranks": 4, "expert_parallel": 2, "optimizer": {"offload": True}})
