"""Measures memory: peaks of the device in a step and of the process, and what the host has left."""

import resource
from collections.abc import Iterable, Mapping

import torch

from penstock.runtime.host.available_memory import memory_here

_MAXRSS_BYTES = 1024
"""Bytes per unit of ru_maxrss, which Linux counts in KiB."""
_SPARE = 2
"""How many times a copy that could be left out must fit into the remaining memory: others may need some meanwhile."""


def reset_memory_peak(device: torch.device) -> None:
    """Start measuring a step."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_peaks(device: torch.device) -> dict[str, float]:
    """Return peaks in bytes: of the device since `reset_memory_peak`, and of the process since it began."""
    peaks = {"host_memory_peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES)}
    if device.type == "cuda":
        peaks["device_memory_peak_bytes"] = float(torch.cuda.max_memory_allocated(device))
    return peaks


def highest(peaks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the maximum over ranks of each peak."""
    found: dict[str, float] = {}
    for of_rank in peaks:
        found |= {name: max(peak, found.get(name, 0.0)) for name, peak in of_rank.items()}
    return found


def has_room_to_spare(size_bytes: int) -> bool:
    """Return whether the host's memory has ample room for a copy of this size that could be left out."""
    try:
        return _SPARE * size_bytes <= memory_here()
    except (OSError, KeyError, ValueError):  # a host that does not tell
        return False
