"""A rank alone writes a checkpoint from a copy, so that the next update need not wait, if its host has the memory."""

from pathlib import Path

import pytest
import torch

from services.trainer.backend import memory
from services.trainer.backend.base import take_step
from tests.support.trainer.steps import VERSION, four_groups, loaded, same_weights, weights


@pytest.mark.parametrize(("spare_bytes", "is_copied"), [(0, True), (-1, False)])
def test_a_checkpoint_is_of_the_moment_before_the_update_that_it_lets_go_on(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare_bytes: int, is_copied: bool
) -> None:
    """With room for twice a copy no file is written before the update may come; with a byte less all are."""
    kl = {"kind": "k2", "refresh": "ema", "refresh_every": 1, "ema_weight": 0.5}
    backend, groups = loaded(tiny_model_path, kl=kl), four_groups(tiny_model_path)
    take_step(backend, [groups], VERSION)
    num_bytes = 2 * backend.collect().size_bytes
    monkeypatch.setattr(memory, "memory_here", lambda: num_bytes + spare_bytes)
    plain, beside = tmp_path / "plain", tmp_path / "beside"
    plain.mkdir()
    beside.mkdir()
    expected = dict(backend.save(plain))
    before, files = weights(backend), list[Path]()

    def update() -> None:
        files.extend(path for path in beside.rglob("*") if path.is_file())
        take_step(backend, [groups], VERSION)

    written = dict(backend.save(beside, on_copied=update))
    assert (not files) is is_copied
    assert not same_weights(backend, before)
    assert {path.split("/")[0] for path in written} == {"model", "optimizer", "reference", "trainer.pt"}
    states = [torch.load(folder / "trainer.pt", weights_only=True) for folder in (plain, beside)]
    assert states[0]["optimizer"]["num_updates"] == states[1]["optimizer"]["num_updates"] == 1
    assert states[0]["reference"] == states[1]["reference"]
    del expected["trainer.pt"], written["trainer.pt"]
    assert written == expected


@pytest.mark.parametrize("error", [PermissionError, KeyError, ValueError])
def test_a_host_that_does_not_tell_its_memory_has_none_to_spare(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """A checkpoint is written either way."""

    def unreadable() -> int:
        raise error

    monkeypatch.setattr(memory, "memory_here", unreadable)
    assert not memory.has_room_to_spare(1)
