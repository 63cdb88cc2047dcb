"""What the recipe's learning rates and the place of the optimizer's state make of a real model's step."""

from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from penstock.errors import ConfigError, SetupError
from penstock.model.families.qwen_vl import part_of
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.base import take_step
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.batching.sequences import TrainGroup
from services.trainer.config import TrainerConfig
from tests.support.trainer.checkpoints import averages_of
from tests.support.trainer.read_groups import groups_with_pictures


def backend_of(path: Path, checkpoint: Path | None = None, *, kl: str = "none", **optimizer: Any) -> InProcessBackend:
    """One with these settings of the optimizer, on the CPU."""
    config = TrainerConfig.model_validate({"device": "cpu", "optimizer": {"learning_rate": 1e-3, **optimizer}})
    algorithm = AlgorithmConfig.model_validate({"kl": {"kind": kl}})
    backend = InProcessBackend(path, config, algorithm, seed=0, temperature=1.0)
    backend.load(checkpoint)
    return backend


@pytest.fixture(scope="module")
def groups(tiny_model_path: Path) -> list[TrainGroup]:
    """Two with a picture and a signal."""
    return groups_with_pictures(tiny_model_path, rewards=[(1.0, 0.0, 0.0, 1.0)] * 2, versions=[1, 1])


def weights(backend: InProcessBackend) -> dict[str, torch.Tensor]:
    """What an engine would get, copied."""
    return {name: weight.clone() for name, weight in backend.export()}


def test_a_frozen_part_stays_and_is_still_pushed(
    tiny_model_path: Path, groups: list[TrainGroup], tmp_path: Path
) -> None:
    """With rate 0 the tower has neither gradient nor averages; everything else moves; a push has every parameter."""
    everything = set(weights(backend_of(tiny_model_path)))
    backend = backend_of(tiny_model_path, learning_rates={"tower": 0.0})
    before = weights(backend)
    metrics = take_step(backend, [groups], 1)
    after = weights(backend)
    assert set(after) == everything
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {part_of(name) for name in moved} == {"merger", "text"}
    assert moved == {name for name in everything if part_of(name) != "tower"}
    assert metrics["learning_rate"] == 1e-3
    backend.save(tmp_path)
    assert set(averages_of(tmp_path)) == moved


def test_a_part_that_is_thawed_at_a_resume_is_trained_from_then_on(
    tiny_model_path: Path, groups: list[TrainGroup], tmp_path: Path
) -> None:
    """The recipe decides, the other averages go on, and the log says so."""
    backend = backend_of(tiny_model_path, learning_rates={"tower": 0.0})
    take_step(backend, [groups], 1)
    backend.save(tmp_path)
    with structlog.testing.capture_logs() as logs:
        resumed = backend_of(tiny_model_path, tmp_path, learning_rates={"tower": 1e-4})
    changed = [entry for entry in logs if entry["event"] == "setting.changed"]
    assert [(each["setting"], each["checkpoint"], each["recipe"]) for each in changed] == [
        ("trainer.optimizer.learning_rates.tower", 0.0, 1e-4)
    ]
    [started] = [entry for entry in logs if entry["event"] == "averages.changed"]
    num_in_tower = sum(part_of(name) == "tower" for name in weights(resumed))
    assert (started["num_started"], started["num_dropped"]) == (num_in_tower, 0)
    before = weights(resumed)
    assert take_step(resumed, [groups], 2)["learning_rate_tower"] == 1e-4
    after = weights(resumed)
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_a_checkpoint_of_an_earlier_version_is_refused(tiny_model_path: Path, tmp_path: Path) -> None:
    """With what can be done with it: its model is still one."""
    (tmp_path / "optimizer.pt").touch()
    with pytest.raises(SetupError, match=rf"an earlier version of Penstock wrote it.*--model\.path={tmp_path}/model"):
        backend_of(tiny_model_path, tmp_path)


def test_a_misspelt_part_ends_the_start(tiny_model_path: Path) -> None:
    """Before anything is trained; and the tiny model's head is its embedding."""
    with pytest.raises(ConfigError, match="no parameter fits 'towr'"):
        backend_of(tiny_model_path, learning_rates={"towr": 0.0})
    with pytest.raises(ConfigError, match="the head of this model is its embedding"):
        backend_of(tiny_model_path, learning_rates={"head": 0.0})


def test_an_offloaded_optimizer_takes_the_same_steps(
    tiny_model_path: Path, groups: list[TrainGroup], tmp_path: Path
) -> None:
    """Two steps with a frozen part and a reference policy, a checkpoint, and a third step: every bit is equal.

    Each of the two goes on from the other's checkpoint.
    """
    settings: dict[str, Any] = {"learning_rates": {"tower": 0.0}, "weight_decay": 0.1, "kl": "k3"}
    backends = {place: backend_of(tiny_model_path, **settings, offload=place == "host") for place in ("device", "host")}
    results = {}
    for place, backend in backends.items():
        metrics = [take_step(backend, [groups], version) for version in (1, 2)]
        (tmp_path / place).mkdir()
        backend.save(tmp_path / place)
        results[place] = [(each["loss"], each["grad_norm"]) for each in metrics], backend.digests().weights
    assert results["host"] == results["device"]
    third = {}
    for place, other in (("device", "host"), ("host", "device")):
        resumed = backend_of(tiny_model_path, tmp_path / other, **settings, offload=place == "host")
        assert resumed.digests().weights == results["host"][1]
        loss = take_step(resumed, [groups], 3)["loss"]
        third[place] = loss, resumed.digests().weights
    assert third["host"] == third["device"]
    take_step(backends["device"], [groups], 3)
    assert backends["device"].digests().weights == third["device"][1]


def test_an_offloaded_model_computes_in_the_precision_of_the_device(
    tiny_model_path: Path, groups: list[TrainGroup], tmp_path: Path
) -> None:
    """bfloat16 weights on the device, float32 on the host and in the checkpoint; a small step is not lost."""
    config = TrainerConfig.model_validate(
        {"device": "cpu", "dtype": "bfloat16", "optimizer": {"learning_rate": 1e-6, "offload": True}}
    )
    backend = InProcessBackend(tiny_model_path, config, AlgorithmConfig(), seed=0, temperature=1.0)
    backend.load(None)
    exact = take_step(backend_of(tiny_model_path), [groups], 1)
    assert {parameter.dtype for parameter in backend.policy.parameters()} == {torch.bfloat16}
    before = backend.digests()
    metrics = take_step(backend, [groups], 1)
    assert metrics["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.05)
    assert backend.digests() != before
    backend.save(tmp_path)
    resumed = backend_of(tiny_model_path, tmp_path)
    assert resumed.digests() == backend.digests()
