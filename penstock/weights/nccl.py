"""Settings of NCCL and torch for the process groups of pushes, the same in trainer and engines.

Seen on one GPU (docs/benchmarks.md): a process group that blocks tries to connect to a dead member for ever, whatever
its deadline.
"""

import datetime
import os
from typing import Any

_DEFAULTS = {
    # A dead member fails the broadcast, and the process group is closed. By default (3) torch would also end every
    # other member's process, so that an engine's death would kill the trainer.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # After a failure torch's watchdog waits four times as long as this, a minute by default, for a report of what its
    # process groups did. Only then does it abort the transfer (ProcessGroupNCCL.cpp), so whoever waits for the transfer
    # waits as long.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
    # Nor does it write that report, after which a monitor would end the process if its process group were not closed by
    # then.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Seconds in which the members of a process group that does not block must connect. By default it is 1800.
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "30",
    # Trainer and engine may share a GPU. By default NCCL (2.30 and newer) refuses two members on one GPU.
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
}


def environment() -> dict[str, str]:
    """Return the variables to set before the first process group forms; those already set keep their values."""
    return {name: os.environ.get(name, value) for name, value in _DEFAULTS.items()}


def group_options(backend: str, timeout: datetime.timedelta) -> Any:
    """Return the backend options of a push's process group: with NCCL it does not block; None for another backend."""
    if backend != "nccl":
        return None
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.blocking = 0
    return options
