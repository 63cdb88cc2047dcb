"""A trainer of several ranks, in real processes, that does what its standard input says.

    python -m tests.support.trainer.ranks.ranks_trainer MODEL NUM_RANKS [OPTIONS] [COMMANDS]

It takes a rank that was silent for --silence-s for hung, and one that did not move for --stall-s for stuck. With --odd,
rank 1 is odd (`odd_backend`). Commands, a line each, or in COMMANDS separated by semicolons: `load [CHECKPOINT]`,
`step SEED`, `begin`, `save FOLDER`, `checkpoint FOLDER STEP PAUSE_S`, `meet`, `close`. Each is answered with a line of
JSON; the first line, before any, is the pids of the ranks that it has started. Under torchrun it is one of the ranks,
and if it is rank 0, it joins the others --late-s after them, as one does that opens its data first. They divide the
experts of a mixture among all of them.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d

from penstock.config import LogConfig
from penstock.model.families.experts import num_experts
from penstock.telemetry import log
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.base import take_step
from services.trainer.backend.ranks import beats, processes, start
from services.trainer.backend.ranks.many_ranks import ManyRanksBackend
from services.trainer.backend.ranks.start import follow_torchrun, is_follower, open_ranks
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.config import BackendConfig, OptimizerConfig
from tests.support.trainer.ranks.odd_backend import OddBackend
from tests.support.trainer.ranks.ranked_groups import VERSION, groups_of


def main(model: Path, num_ranks: int, commands: Iterable[str], odd: str, late_s: float) -> None:
    """Do it."""
    log.configure(LogConfig(), service="trainer")
    config = BackendConfig(device="cpu", optimizer=OptimizerConfig(learning_rate=1e-3))
    arguments: dict[str, Any] = {
        "model_path": model,
        "config": config,
        "algorithm": AlgorithmConfig(),
        "seed": 0,
        "temperature": 1.0,
        "adam_eps": 1e-3,
        "expert_parallel": num_ranks if num_experts(model) else 1,
    }
    if odd:
        arguments["odd"] = odd
        vars(start)["InProcessBackend"] = OddBackend
    if is_follower():
        follow_torchrun(arguments, num_ranks=num_ranks)
        return
    time.sleep(late_s)
    backend = open_ranks(arguments, num_ranks=num_ranks)
    assert isinstance(backend, ManyRanksBackend)
    say(backend._processes.pids if isinstance(backend._processes, processes.RankProcesses) else [])
    for line in commands:
        match line.split():
            case ["load", *paths]:
                backend.load(Path(paths[0]) if paths else None)
                say(backend.digests().weights)
            case ["step", seed]:
                groups = groups_of(model, seed=int(seed))
                metrics = take_step(backend, [groups[:1], groups[1:]], VERSION + int(seed))
                say([metrics["loss"], backend.digests().weights])
            case ["begin"]:
                backend.begin_step(VERSION)
                say("begun")
            case ["save", folder]:
                backend.save(Path(folder))
                say("saved")
            case ["checkpoint", folder, step, pause_s]:

                def save_and_pause(partial: Path, pause_s: float = float(pause_s)) -> Mapping[str, str]:
                    written = backend.save(partial)
                    time.sleep(pause_s)
                    return written

                CheckpointStore(Path(folder), keep=2).save(int(step), {}, save_and_pause)
                say("saved")
            case ["meet"]:
                say(distributed_c10d._get_default_store().add("met", 1))
            case ["close"]:
                backend.close()
                say("closed")
                return


def say(answer: object) -> None:
    """A line of JSON."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("num_ranks", type=int)
    parser.add_argument("commands", nargs="?")
    parser.add_argument("--silence-s", type=float, default=60.0)
    parser.add_argument("--stall-s", type=float, default=60.0)
    parser.add_argument("--late-s", type=float, default=0.0)
    parser.add_argument("--odd", default="")
    given = parser.parse_args()
    commands = given.commands.split(";") if given.commands else sys.stdin
    beats.SILENCE_S, beats.STALL_S = given.silence_s, given.stall_s
    main(given.model, given.num_ranks, commands, given.odd, given.late_s)
