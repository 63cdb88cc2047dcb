"""Environment of NCCL and torch, the same in trainer and engines, set before the first process group forms."""

import os

_DEFAULTS = {
    # A dead member fails the broadcast, and the group is closed. By default (3) torch would also end every other
    # member's process, so that an engine's death would kill the trainer.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # Seconds in which members must connect to the trainer, whose groups do not block. By default it is 1800.
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "30",
    # Trainer and engine may share a GPU. By default NCCL (2.30 and newer) refuses two members on one GPU.
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
}


def environment() -> dict[str, str]:
    """Return the variables; those already set keep their values."""
    return {name: os.environ.get(name, value) for name, value in _DEFAULTS.items()}
