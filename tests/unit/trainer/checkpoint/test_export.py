"""`penstock export`: what a run has trained, as a model folder that transformers loads."""

import errno
import json
import os
import resource
import shutil
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import SetupError
from services.cli import main
from services.trainer.backend.files import merge_adapter as merging
from services.trainer.backend.files.adapter_folder import read_adapter_config
from services.trainer.backend.files.cast_model import cast_model
from services.trainer.checkpoint.store import CheckpointStore
from tests.support.trainer.families import FAMILIES, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float32, in several files."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("models")
    written = write_model(FAMILIES["qwen3"](), folder / "one-file")
    loaded = AutoModelForCausalLM.from_pretrained(written)
    loaded.save_pretrained(folder / "several", max_shard_size="200KB")
    (folder / "several/chat_template.jinja").write_text("{{ messages }}")
    assert len([*(folder / "several").glob("*.safetensors")]) > 2
    return folder / "several"


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Path:
    """A run with checkpoints of steps 2 and 4."""
    store = CheckpointStore(tmp_path / "run/checkpoints", keep=3)
    for step in (2, 4):
        store.save(step, {}, lambda folder: shutil.copytree(model, folder / "model") and None)
    return tmp_path / "run"


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """As transformers loads them, in the precision that config.json names."""
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").named_parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_the_model_of_the_run(run: Path, model: Path, dtype: torch.dtype, tmp_path: Path) -> None:
    """Every weight, rounded; tokenizer, template and settings as they are."""
    target = tmp_path / "somewhere/exported"
    name = str(dtype).removeprefix("torch.")
    assert main(["export", str(run), str(target), "--step", "2", f"--dtype={name}"]) == 0
    exported, trained = weights_of(target), weights_of(model)
    assert exported.keys() == trained.keys()
    for each, weight in trained.items():
        assert exported[each].dtype == dtype
        assert torch.equal(exported[each], weight.to(dtype)), each
    assert sorted(path.name for path in target.iterdir()) == sorted(path.name for path in model.iterdir())
    assert (target / "chat_template.jinja").read_bytes() == (model / "chat_template.jinja").read_bytes()
    config = json.loads((target / "config.json").read_text())
    assert config == json.loads((model / "config.json").read_text()) | {"dtype": name}
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in exported.values())


def test_others_may_read_it(run: Path, tmp_path: Path) -> None:
    """As far as the umask lets them: the weights like the files beside them."""
    umask = os.umask(0o027)
    try:
        assert main(["export", str(run), str(tmp_path / "exported")]) == 0
    finally:
        os.umask(umask)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "exported").iterdir()}
    assert modes == dict.fromkeys(modes, 0o640)


def test_it_is_complete_or_absent(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk is told, and nothing stays; the same command works when there is room."""
    arguments = ["export", str(run), str(tmp_path / "exported")]
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
    try:
        assert main(arguments) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path}: ")
    assert said.endswith("make room there, or name a folder on another disk\n")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert main(arguments) == 0
    assert f"{run}/checkpoints/step-000004/model, weights in bfloat16" in capsys.readouterr().out


def test_an_end_by_sigterm_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after Ctrl-C, with the same exit code."""
    mkdir = os.mkdir

    def make_and_stop(path: Any, *options: Any) -> None:
        mkdir(path, *options)
        if str(path).endswith(".partial"):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(os, "mkdir", make_and_stop)
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert main(["export", str(run), str(tmp_path / "exported")]) == 130
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_disk_too_full_for_the_folder_is_told(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that is too full for a file."""
    mkdir = os.mkdir

    def refuse(path: Any, *options: Any) -> None:
        if str(path).endswith(".partial"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        mkdir(path, *options)

    monkeypatch.setattr(os, "mkdir", refuse)
    assert main(["export", str(run), str(tmp_path / "exported")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path}: [Errno 28] No space left on device")
    assert said.endswith("make room there, or name a folder on another disk\n")


def test_a_checkpoint_that_its_run_deletes_meanwhile_is_told(run: Path, tmp_path: Path) -> None:
    """Between two files, or before the first; nothing stays."""
    model = run / "checkpoints/step-000004/model"

    def delete(_: str, tensor: torch.Tensor) -> torch.Tensor:
        shutil.rmtree(model.parent, ignore_errors=True)
        return tensor

    for _ in range(2):
        with pytest.raises(SetupError, match=r"step-000004/model was deleted while .*; give the command again"):
            cast_model(model, tmp_path / "exported", dtype="bfloat16", change=delete)
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_adapters_that_their_run_deletes_meanwhile_are_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base without them is no export."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 1, "lora_alpha": 1}))

    def read_and_delete(folder: Path) -> dict[str, Any]:
        config = read_adapter_config(folder)
        shutil.rmtree(folder)
        return config

    monkeypatch.setattr(merging, "read_adapter_config", read_and_delete)
    for _ in range(2):  # after the configuration was read, and before
        with pytest.raises(SetupError, match=r"adapter was deleted while .*; give the command again"):
            merging.merge_adapter(adapter, tmp_path / "exported", dtype="bfloat16", base=model)
        assert not [*tmp_path.iterdir()]


def test_what_cannot_be_exported_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By name, with what to do."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "no-weights").mkdir()
    (tmp_path / "no-weights/config.json").write_text("{}")
    for source, target, options, message in (
        (run, "new", ["--step", "3"], "has no complete checkpoint of step 3; there are checkpoints of: 2, 4"),
        (run, "taken", [], "taken is there already; name a folder that is not"),
        (run, "file/new", [], f"{tmp_path}/file/new cannot be made: Not a directory; name another folder"),
        (tmp_path, "new", [], "is neither a model folder (config.json), nor a checkpoint (model/), nor a run"),
        (tmp_path / "no-weights", "new", [], "has no .safetensors files"),
        (run, "new", ["--dtype", "int8"], "int8"),
    ):
        assert main(["export", str(source), str(tmp_path / target), *options]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "new").exists()
