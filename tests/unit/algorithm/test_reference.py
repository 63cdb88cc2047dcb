"""A reference policy beside the policy: where it stays, follows, lies in memory, and goes on from."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import ConfigError
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.base import take_step
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.batching.sequences import TrainGroup
from services.trainer.config import BackendConfig, OptimizerConfig
from tests.support.trainer.checkpoints import tensors_of
from tests.support.trainer.steps import VERSION, loaded, weights


def test_the_reference_stays_where_the_run_began(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """The first step has distance 0 and the gradient of a run without it; later ones are pulled back."""
    free, held = loaded(tiny_model_path), loaded(tiny_model_path, kl={"kind": "k3", "coef": 10.0})
    first = take_step(held, [groups], VERSION)
    assert first["kl_reference"] == pytest.approx(0, abs=1e-7)
    assert first["kl_loss"] == pytest.approx(0, abs=1e-6)
    assert first["grad_norm"] == pytest.approx(take_step(free, [groups], VERSION)["grad_norm"], rel=1e-3)
    start = {name: weight.float() for name, weight in loaded(tiny_model_path).export()}
    for _ in range(8):
        last = take_step(held, [groups], VERSION)
        take_step(free, [groups], VERSION)
    assert last["kl_loss"] > 0

    def distance(backend: InProcessBackend) -> float:
        return sum(float((weight - start[name]).square().sum()) for name, weight in backend.export())

    assert distance(held) < distance(free)


def test_the_reference_follows_the_policy(tiny_model_path: Path, groups: list[TrainGroup], tmp_path: Path) -> None:
    """copy: after every second step it is the policy. ema: it goes a share of the way."""
    backend = loaded(tiny_model_path, kl={"kind": "k2", "refresh": "copy", "refresh_every": 2})
    distances = [abs(take_step(backend, [groups], VERSION)["kl_reference"]) for _ in range(3)]
    assert distances[1] > 1e-3
    assert distances[0] < 1e-7
    assert distances[2] < 1e-7
    half = loaded(tiny_model_path, kl={"kind": "k2", "refresh": "ema", "refresh_every": 1, "ema_weight": 0.5})
    start = weights(half)
    take_step(half, [groups], VERSION)
    half.save(tmp_path)
    reference = tensors_of(tmp_path / "reference")
    for name, now in half.policy.model.named_parameters():
        expected = (start[name] + now.detach()) / 2
        torch.testing.assert_close(reference[name], expected, rtol=0, atol=1e-6)


def test_the_reference_moves_to_the_device_once_a_step(
    tiny_model_path: Path, groups: list[TrainGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many chunks it has; after the step, or one that was left out, its copy there is gone."""
    copies: list[weakref.ref[torch.Tensor]] = []
    functional_call = torch.func.functional_call

    def seen(policy: Any, held: dict[str, torch.Tensor], inputs: Any) -> Any:
        (one, *_) = held.values()
        if not any(copy() is one for copy in copies):
            copies.append(weakref.ref(one))
        return functional_call(policy, held, inputs)

    monkeypatch.setattr(torch.func, "functional_call", seen)
    config = BackendConfig(device="cpu", dtype="bfloat16", optimizer=OptimizerConfig(offload=True))
    algorithm = AlgorithmConfig.model_validate({"kl": {"kind": "k3"}})
    backend = InProcessBackend(tiny_model_path, config, algorithm, seed=0, temperature=1.0)
    backend.load(None)
    for end in (backend.finish_step, backend.abort_step):
        backend.begin_step(VERSION)
        for group in groups:
            backend.accumulate([group])
        assert len(copies) == 1
        end()
        assert copies.pop()() is None


def test_reference_and_entropy_go_on_from_a_checkpoint(
    tiny_model_path: Path, groups: list[TrainGroup], tmp_path: Path
) -> None:
    """Two steps, a checkpoint, a third; or the checkpoint loaded and the third: equal to the bit."""
    settings: dict[str, Any] = {
        "kl": {"kind": "k3", "coef": 0.1, "refresh": "copy", "refresh_every": 3},
        "entropy": {"kind": "target", "coef": 0.01, "target": 50.0, "adjustment": 0.004},
    }
    backend = loaded(tiny_model_path, **settings)
    assert [take_step(backend, [groups], VERSION)["entropy_coef"] for _ in range(2)] == pytest.approx([0.01, 0.014])
    backend.save(tmp_path)
    expected = take_step(backend, [groups], VERSION)
    assert expected["entropy_coef"] == pytest.approx(0.018)
    resumed = loaded(tiny_model_path, tmp_path, **settings)
    again = take_step(resumed, [groups], VERSION)
    assert {name: again[name] for name in ("loss", "kl_loss", "entropy_loss", "grad_norm")} == {
        name: expected[name] for name in ("loss", "kl_loss", "entropy_loss", "grad_norm")
    }
    assert abs(take_step(resumed, [groups], VERSION)["kl_reference"]) < 1e-7  # the third step refreshed it


def test_a_resumed_run_cannot_invent_its_reference(
    tiny_model_path: Path, groups: list[TrainGroup], tmp_path: Path
) -> None:
    """The weights that the run began with are gone; the present ones would be another reference."""
    backend = loaded(tiny_model_path)
    take_step(backend, [groups], VERSION)
    backend.save(tmp_path)
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.kind = 'k2' needs a reference policy, but .* without one"):
        loaded(tiny_model_path, tmp_path, kl={"kind": "k2"})
