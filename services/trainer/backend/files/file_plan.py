"""Which rank writes which tensors of a checkpoint, and into which files. Pure.

Every rank plans the same from the same sizes, so none has to ask another.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MAX_FILE_BYTES = 4 * 10**9
"""Larger tensors have a file of their own. A file is in memory a second time where its tensors must be transposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """A file of a checkpoint."""

    rank: int
    """The rank that writes it."""
    name: str
    tensors: tuple[str, ...]
    """Names of the tensors in it."""


def owners_of(sizes: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Return the rank that writes each tensor: about as many bytes for each rank, and neighbours for the same one.

    Args:
        sizes: Bytes of each tensor.
        num_ranks: How many ranks write.
    """
    total = max(1, sum(sizes.values()))
    owners, before = {}, 0
    for name, size in sizes.items():
        middle = before + size / 2
        owners[name] = min(num_ranks - 1, int(middle * num_ranks / total))
        before += size
    return owners


def plan_files(
    stem: str, sizes: Mapping[str, int], owners: Mapping[str, int], *, max_bytes: int = MAX_FILE_BYTES
) -> list[PlannedFile]:
    """Return the files of a set of tensors, named as transformers names the files of a model.

    Args:
        stem: How their names begin.
        sizes: Bytes of each tensor, in the order of `owners_of`.
        owners: The rank that writes each tensor.
        max_bytes: The most bytes of a file with more than one tensor.
    """
    runs: list[tuple[int, list[str]]] = []
    num_bytes = 0
    for name, size in sizes.items():
        if not runs or runs[-1][0] != owners[name] or num_bytes + size > max_bytes:
            runs.append((owners[name], []))
            num_bytes = 0
        runs[-1][1].append(name)
        num_bytes += size
    names = [f"{stem}-{number:05d}-of-{len(runs):05d}.safetensors" for number in range(1, len(runs) + 1)]
    if len(runs) == 1:
        names = [f"{stem}.safetensors"]
    return [
        PlannedFile(rank=rank, name=name, tensors=tuple(tensors))
        for name, (rank, tensors) in zip(names, runs, strict=True)
    ]


def rounds_of_owners(owners: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """Yield the names in rounds: each rank owns at most one of a round, and its tensors come in their order."""
    of_rank: dict[int, list[str]] = {}
    for name, rank in owners.items():
        of_rank.setdefault(rank, []).append(name)
    for number in range(max(map(len, of_rank.values()), default=0)):
        yield tuple(names[number] for names in of_rank.values() if number < len(names))
