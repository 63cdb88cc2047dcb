"""Converts a model folder to another precision: a checkpoint's model, to the precision of published models.

A checkpoint's `model/` is already a model folder, in float32. An exported one has the same files, with weights in
another precision. It is written under another name, flushed and renamed, so it is complete or absent.
"""

import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from penstock.errors import ConfigError, SetupError
from penstock.runtime.disk_space import disk_full_reported, flush, is_disk_full
from penstock.weights.manifest import dtype_of
from services.trainer.backend.files.tensor_files import save_tensors

_WEIGHTS = ".safetensors"
_INDEX = ".safetensors.index.json"
_DTYPE_KEYS = ("dtype", "torch_dtype")


def _unchanged(_: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def cast_model(
    model: Path, target: Path, *, dtype: str, change: Callable[[str, torch.Tensor], torch.Tensor] = _unchanged
) -> int:
    """Write a model folder with weights in another precision; return their size in bytes.

    One weight file is in memory at a time. Tensors that are not floating-point stay unchanged.

    Args:
        model: A model folder with safetensors files, such as `model/` of a checkpoint.
        target: The folder to create. Its parents are created too.
        dtype: A floating-point type of torch: "bfloat16".
        change: Returns what to cast and write, given a tensor's name and the tensor.

    Raises:
        ConfigError: `target` already exists, or `model` has no safetensors files.
        SetupError: there is no room for it, it cannot be made, or `model` was deleted while it was read.
    """
    if target.exists():
        raise ConfigError(f"{target} is there already; name a folder that is not")
    with deletion_reported(model):
        files = sorted(path for path in model.iterdir() if path.is_file())
    if not any(path.name.endswith(_WEIGHTS) for path in files):
        raise ConfigError(f"{model} has no {_WEIGHTS} files; name a run, a checkpoint or a model folder that has")
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    remedy = "make room there, or name a folder on another disk"
    try:
        with disk_full_reported(target.parent, remedy), deletion_reported(model):
            _make(partial, target)
            sizes = [_write(path, partial / path.name, dtype, change) for path in files if path.name.endswith(_WEIGHTS)]
            for path in files:
                if not path.name.endswith(_WEIGHTS):
                    _copy(path, partial / path.name, dtype, num_bytes=sum(sizes))
            for path in (*partial.iterdir(), partial):
                flush(path)
            partial.rename(target)
            flush(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return sum(sizes)


@contextmanager
def deletion_reported(folder: Path) -> Iterator[None]:
    """Read `folder`, a model or adapters.

    Raises:
        SetupError: it was deleted.
    """
    try:
        yield
    except FileNotFoundError:
        if folder.exists():
            raise
        raise SetupError(
            f"{folder} was deleted while it was read, as a live run deletes checkpoints beyond "
            "trainer.keep_checkpoints; give the command again"
        ) from None


def _make(partial: Path, target: Path) -> None:
    """Make the folder that will be renamed to `target`, and its parents."""
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        if is_disk_full(error):
            raise
        raise SetupError(f"{target} cannot be made: {error.strerror}; name another folder") from None


def _write(source: Path, target: Path, dtype: str, change: Callable[[str, torch.Tensor], torch.Tensor]) -> int:
    """Cast the tensors of a file; return their size in bytes."""
    with safe_open(source, framework="pt") as file:
        tensors = {
            name: _cast(change(name, file.get_tensor(name)), dtype_of(dtype))
            for name in file.keys()  # noqa: SIM118 - it is no mapping
        }
        save_tensors(tensors, target, metadata=file.metadata())
    return sum(tensor.nbytes for tensor in tensors.values())


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _copy(source: Path, target: Path, dtype: str, *, num_bytes: int) -> None:
    if source.name == "config.json":
        target.write_text(json.dumps(with_dtype(json.loads(source.read_text()), dtype), indent=2) + "\n")
    elif source.name.endswith(_INDEX):
        index = json.loads(source.read_text())
        index.get("metadata", {})["total_size"] = num_bytes
        target.write_text(json.dumps(index, indent=2) + "\n")
    else:
        shutil.copyfile(source, target)


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a model's configuration with another precision: at the top, and in every part that names one."""

    def renamed(part: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: dtype if key in _DTYPE_KEYS else renamed(value) if isinstance(value, dict) else value
            for key, value in part.items()
        }

    found = renamed(config)
    return found if any(key in found for key in _DTYPE_KEYS) else {**found, "dtype": dtype}
