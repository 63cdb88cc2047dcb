"""What NCCL and torch are told in trainer and engines alike, before the first group of a push forms."""

import os

_DEFAULTS = {
    # A member that dies fails the broadcast, and the group is closed. By default (3) torch would end the process of
    # every other member too: an engine's death would be the trainer's.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # Trainer and engine may share a GPU. Without it NCCL (2.30 and newer) refuses a group with two members on one.
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
}


def environment() -> dict[str, str]:
    """Environment variables; one that is set already keeps its value."""
    return {name: os.environ.get(name, value) for name, value in _DEFAULTS.items()}
