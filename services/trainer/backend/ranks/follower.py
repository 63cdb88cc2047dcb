"""The process of a rank that is not rank 0: takes part in what rank 0 commands, until rank 0 is gone.

    python -m services.trainer.backend.ranks.follower RANK SIZE STORE DEVICE SOCKET

`processes` starts it. What it computes it is told when it has joined.
"""

import signal
import socket
import sys
import threading
import time

import structlog

from penstock.config import LogConfig
from penstock.errors import PenstockError
from penstock.runtime.imports import kept_for_ever
from penstock.runtime.process import EXIT_FAILURE
from penstock.telemetry import log as logging
from services.trainer.backend.ranks.beats import Pulse
from services.trainer.backend.ranks.processes import beat

log = structlog.get_logger()

_REPORTING_S = 8.0
"""If rank 0 has failed in the same way, it ends the trainer with its own error within this time."""


def main(rank: int, size: int, store: int, device: str, descriptor: int) -> int:
    """Join, and follow; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # rank 0 finishes its step first
    logging.configure(LogConfig(level="error"), service=f"trainer, rank {rank}")  # the rest rank 0 says
    pulse = Pulse()
    threading.Thread(target=beat, args=(socket.socket(fileno=descriptor), pulse), daemon=True).start()
    try:
        _follow(rank, size, store, device, pulse)
    except PenstockError as error:
        log.error("rank.refused", reason=str(error))
    except Exception as error:
        log.error("rank.failed", exc_info=error)
    else:
        return 0
    time.sleep(_REPORTING_S)
    return EXIT_FAILURE


def _follow(rank: int, size: int, store: int, device: str, pulse: Pulse) -> None:
    # torch takes seconds; signals are ignored and rank 0 hears of this process before.
    with kept_for_ever():
        from services.trainer.backend.ranks.many_ranks import follow
        from services.trainer.backend.ranks.start import join_on_this_machine, prepare_device

    placed = prepare_device(device, local_rank=rank, num_local=size)
    ranks = join_on_this_machine(store, rank=rank, size=size, device=placed)
    pulse.count_collectives = ranks.num_collectives
    kind, arguments = ranks.broadcast(None)
    follow(kind(**arguments, ranks=ranks), ranks, pulse)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])))
