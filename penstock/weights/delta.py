"""What has changed between two versions, as few bytes as may be: for links that are slow.

A delta is the exclusive or of old and new bytes. Numbers of a tensor change in their low bytes, mostly, so first bytes
are laid beside first bytes, second beside second; the many zeros then compress well. Applied to other weights than the
old ones it makes neither, which the digests after a push show.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

from penstock.errors import NotReadyError
from penstock.weights.manifest import Manifest, views

DELTA_FILE_NAME = "delta.safetensors"
_LEVEL = 1
"""Higher levels save a few per cent more, and take several times as long."""


def encode_delta(old: torch.Tensor, new: torch.Tensor) -> bytes:
    """From one tensor to another of the same dtype and shape."""
    changed = np.bitwise_xor(_bytes_of(old), _bytes_of(new))
    planes = changed.reshape(new.numel(), new.element_size()).T
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(planes.tobytes())


def apply_delta(held: torch.Tensor, delta: bytes) -> None:
    """Change `held`, which holds the old bytes, into the new ones.

    Raises:
        ValueError: the delta is damaged, or of another tensor.
    """
    try:
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(delta), dtype=np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"delta is damaged: {error}") from None
    changed = torch.from_numpy(planes.reshape(held.element_size(), held.numel()).T.copy())
    if held.numel():
        dense = held.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        dense.bitwise_xor_(changed.to(held.device).view(-1))
        held.copy_(dense.view(held.dtype).view(held.shape))


def write_delta(
    folder: Path, manifest: Manifest, old: tuple[torch.Tensor, ...], new: tuple[torch.Tensor, ...], *, base_version: int
) -> int:
    """Write the delta between the buckets of two versions into `folder`; returns its size in bytes. Blocking."""
    from safetensors.numpy import save_file

    blobs: dict[str, Any] = {}
    for specs, before, after in zip(manifest.buckets, old, new, strict=True):
        olds, news = views(specs, before), views(specs, after)
        for name, tensor in news.items():
            blobs[name] = np.frombuffer(encode_delta(olds[name], tensor), dtype=np.uint8)
    unfinished = folder / f".{DELTA_FILE_NAME}"
    save_file(blobs, unfinished, metadata={"base_version": str(base_version)})
    unfinished.rename(folder / DELTA_FILE_NAME)
    return sum(len(blob) for blob in blobs.values())


def check_delta(folder: Path, base_version: int) -> None:
    """See that the folder holds the delta against `base_version`.

    Raises:
        NotReadyError: it does not.
    """
    try:
        with (folder / DELTA_FILE_NAME).open("rb") as file:
            found = json.loads(file.read(int.from_bytes(file.read(8), "little")))["__metadata__"]["base_version"]
    except (OSError, ValueError, KeyError) as error:
        raise NotReadyError(f"delta in {folder} cannot be read here ({error}); let the trainer send all") from None
    if found != str(base_version):
        raise NotReadyError(f"delta in {folder} is against version {found}, announced was {base_version}")


def read_deltas(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Name and delta, one after the other."""
    from safetensors import safe_open

    with safe_open(folder / DELTA_FILE_NAME, framework="np") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            yield name, file.get_tensor(name).tobytes()


def apply_deltas(held: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Change each tensor that is held by the delta under its name."""
    for name, delta in read_deltas(folder):
        apply_delta(held[name], delta)


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy()
