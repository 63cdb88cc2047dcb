"""The weights of one version as files: a folder with one safetensors file, complete or absent.

Buckets are written without a copy, because the data of a safetensors file are its tensors end to end. The newest two
versions are kept, so that a reader of the older one can finish.
"""

import json
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from penstock.errors import NotReadyError
from penstock.weights.manifest import Manifest
from penstock.weights.version_folders import complete_folders, unfinished_folder, unfinished_folders, version_folder

FILE_NAME = "model.safetensors"
KEEP = 2

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64", "int64": "I64", "int32": "I32",
           "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"}  # fmt: skip


def write_weight_files(parent: Path, version: int, manifest: Manifest, buckets: Sequence[torch.Tensor]) -> Path:
    """Write the folder of `version` below `parent`, delete older versions, and return the folder. Blocking.

    Only one process may write below `parent`: it deletes unfinished folders as leftovers of a killed writer.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for left_behind in unfinished_folders(parent):
        shutil.rmtree(left_behind, ignore_errors=True)
    folder = version_folder(parent, version)
    unfinished = unfinished_folder(parent, version)
    unfinished.mkdir()
    try:
        header = _header(version, manifest)
        with (unfinished / FILE_NAME).open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            for bucket in buckets:
                file.write(memoryview(bucket.cpu().numpy()))
        if folder.exists():
            shutil.rmtree(folder)  # written by a trainer that died; the version is published again
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    written = complete_folders(parent)
    for old in written[: max(0, written.index(folder) + 1 - KEEP)]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def find_weight_files(parent: Path) -> tuple[int, Path] | None:
    """Return the newest version below `parent` and its folder; None if there is none. Blocking."""
    if not parent.is_dir() or not (versions := complete_folders(parent)):
        return None
    return int(versions[-1].name.removeprefix("v")), versions[-1]


def check_weight_files(folder: Path, version: int, manifest: Manifest) -> None:
    """Check that the folder can be read here and contains the announced weights.

    Raises:
        NotReadyError: it cannot, or does not.
    """
    try:
        with (folder / FILE_NAME).open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            found = json.loads(file.read(length))
            num_bytes = os.fstat(file.fileno()).st_size - 8 - length
    except (OSError, ValueError, struct.error) as error:
        raise NotReadyError(f"weight files in {folder} cannot be read here ({error}); use broadcast") from None
    if found != json.loads(_header(version, manifest)) or num_bytes != manifest.num_bytes:
        raise NotReadyError(f"weight files in {folder} are not those announced for version {version}")


def read_weight_files(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor, one at a time, in the order in which they were written."""
    from safetensors import safe_open

    with safe_open(folder / FILE_NAME, framework="pt") as file:
        for name in file.offset_keys():
            yield name, file.get_tensor(name)


def _header(version: int, manifest: Manifest) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt", "policy_version": str(version)}}
    first = 0
    for spec in manifest.tensors:
        end = first + spec.num_bytes
        header[spec.name] = {"dtype": _DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": [first, end]}
        first = end
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % 8)  # aligns the data
