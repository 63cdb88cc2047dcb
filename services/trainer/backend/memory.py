"""The most memory that a step took."""

import resource
from collections.abc import Iterable, Mapping

import torch

_MAXRSS_BYTES = 1024
"""Linux counts ru_maxrss in KiB."""


def reset_memory_peak(device: torch.device) -> None:
    """Begin to measure a step."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_peaks(device: torch.device) -> dict[str, float]:
    """Return metrics in bytes: of the device since `reset_memory_peak`, and of the process since it began."""
    peaks = {"host_memory_peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES)}
    if device.type == "cuda":
        peaks["device_memory_peak_bytes"] = float(torch.cuda.max_memory_allocated(device))
    return peaks


def highest(peaks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the highest of each peak, of all ranks."""
    found: dict[str, float] = {}
    for of_rank in peaks:
        found |= {name: max(peak, found.get(name, 0.0)) for name, peak in of_rank.items()}
    return found
