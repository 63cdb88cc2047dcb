"""What a push over NCCL does when a member dies or freezes: plain processes on one GPU, no engine.

    python bench/gpu/nccl_deaths.py            # on a machine with a GPU
    python bench/gpu/nccl_deaths.py --cpu      # anywhere: gloo

A trainer's `WeightProcessGroup` and two members, of which one is killed or stopped: after the group has formed, when
with NCCL nobody has connected yet, or in the midst of a transfer. The table says after how long the broadcast ends and
how, how long closing the group takes, after how long the other member is released, and whether the same trainer and
that member then finish a push in a new group. A row fails if the trainer waits for longer than the deadline and a
margin, or the next push does not arrive; the exit code is then 1, as it was on a GPU (docs/benchmarks.md).
"""

import argparse
import contextlib
import datetime
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("NCCL_HOSTID", "bench-trainer")  # to NCCL each process is a separate machine
os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", "5")  # shorter than in a run, for the cases to end
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 - after the environment is set
import torch.distributed as dist  # noqa: E402

from penstock.errors import DeadlineError, UnavailableError  # noqa: E402
from penstock.v1 import rollout_pb2  # noqa: E402
from penstock.weights import nccl  # noqa: E402
from services.rollout.testing.memory_sink import joined_group  # noqa: E402
from services.trainer.weight_sync.process_group import WeightProcessGroup  # noqa: E402

DEADLINE_S = 6.0
"""Of a transfer, and a second longer than members may take to connect."""
MARGIN_S = 5.0
"""Within which a broadcast and the closing of its group must have ended after the deadline."""
NUM_PARTS = 64
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def receive(control: Connection, device: torch.device, part_bytes: int) -> None:
    """Run a member: join each announced group, receive all parts, and answer how it went."""
    os.environ["NCCL_HOSTID"] = f"bench-receiver-{os.getpid()}"
    torch.set_num_threads(1)
    torch.ones(1, device=device).sum()
    control.send("ready")
    while message := control.recv():
        source = rollout_pb2.BroadcastSource.FromString(message)
        group = joined_group(source, timeout=datetime.timedelta(seconds=DEADLINE_S))
        control.send("joined")
        control.recv()
        outcome = "received"
        try:
            for _ in range(NUM_PARTS):
                part = torch.zeros(part_bytes, dtype=torch.uint8, device=device)
                dist.broadcast(part, src=0, group=group)
                if int(part[-1]) != 7:  # waits for the GPU, as whoever uses the weights does
                    raise ValueError("a part arrived wrong")
        except (RuntimeError, ValueError) as error:
            outcome = str(error).split("\n", 1)[0]
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group(group)
        control.send(outcome)


class Member:
    """A receiving process."""

    def __init__(self, device: torch.device, part_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.control, its = context.Pipe()
        self.process = context.Process(target=receive, args=(its, device, part_bytes), daemon=True)
        self.process.start()

    def await_ready(self) -> None:
        """Wait until the process can join a group."""
        self.control.recv()

    def send(self, signal_number: int) -> None:
        """Signal the process."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal_number)

    def outcome(self, timeout_s: float) -> str:
        """Return how its transfer went."""
        if not self.control.poll(timeout_s):
            return "still waits" if self.process.is_alive() else f"ended with {self.process.exitcode}"
        try:
            return str(self.control.recv())
        except EOFError:
            self.process.join()
            return f"ended with {self.process.exitcode}"


def open_group(members: list[Member], name: str, backend: str) -> WeightProcessGroup:
    """Form a group of the trainer and the members."""
    size = 1 + len(members)
    group = WeightProcessGroup.listen(host="127.0.0.1", name=name, world_size=size, backend=backend)
    for rank, member in enumerate(members, start=1):
        source = rollout_pb2.BroadcastSource(
            group_name=name, master_host="127.0.0.1", master_port=group.port, rank_offset=rank, world_size=size,
            backend=backend,
        )  # fmt: skip
        member.control.send(source.SerializeToString())
    group.form(timeout_s=DEADLINE_S)
    for member in members:
        assert member.control.recv() == "joined"
    return group


def parts(part: torch.Tensor, half_sent: threading.Event) -> Iterator[torch.Tensor]:
    """Yield the parts of a push."""
    for number in range(NUM_PARTS):
        if number == NUM_PARTS // 2:
            half_sent.set()
            time.sleep(0.5)  # for the signal to arrive while both sides are in the transfer
        yield part


def try_case(
    what: str, when: str, members: tuple[Member, Member], device: torch.device, backend: str, part_bytes: int
) -> tuple[list[str], bool]:
    """Return a row of the table, and whether it is as it should be."""
    victim, other = members
    for member in members:
        member.await_ready()
    part = torch.full((part_bytes,), 7, dtype=torch.uint8, device=device)
    group = open_group([victim, other], f"{what}-{when}", backend)
    half_sent = threading.Event()
    if when == "before":
        victim.send(SIGNALS[what])
        time.sleep(0.2)
    else:
        threading.Thread(target=lambda: (half_sent.wait(), victim.send(SIGNALS[what])), daemon=True).start()
    for member in (victim, other):
        with contextlib.suppress(BrokenPipeError):  # of a killed one
            member.control.send(True)
    started = time.monotonic()
    try:
        group.broadcast(parts(part, half_sent), timeout_s=DEADLINE_S)
        how = "no error"
    except (DeadlineError, UnavailableError) as error:
        how = f"{type(error).__name__}: {str(error)[-60:]}"
    ended_s = time.monotonic() - started
    closing = threading.Thread(target=group.close, daemon=True)
    closing.start()
    closing.join(DEADLINE_S)
    close_s = time.monotonic() - started - ended_s
    released = other.outcome(2 * DEADLINE_S)
    released_s = time.monotonic() - started
    with contextlib.suppress(ProcessLookupError):
        victim.send(signal.SIGKILL)
    follow_up = "not tried"
    if released not in ("still waits",) and other.process.is_alive():
        group = open_group([other], f"{what}-{when}-next", backend)
        other.control.send(True)
        try:
            group.broadcast(parts(part, threading.Event()), timeout_s=DEADLINE_S)
            follow_up = other.outcome(DEADLINE_S)
        except (DeadlineError, UnavailableError) as error:
            follow_up = type(error).__name__
        group.close()
    other.send(signal.SIGKILL)
    is_right = ended_s + close_s < DEADLINE_S + MARGIN_S and how != "no error" and follow_up == "received"
    row = [f"{what} {when}", f"{ended_s:.1f}", how, f"{close_s:.1f}", f"{released_s:.1f}", released[:60], follow_up]
    return row, is_right


def main() -> int:
    """Try all cases and print the table; return 1 if one is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="with gloo, without a GPU")
    parser.add_argument("--part-mib", type=int, default=0, help="bytes of each of the parts; 0: 32, with --cpu 1")
    arguments = parser.parse_args()
    if not arguments.cpu and not torch.cuda.is_available():
        raise SystemExit("no GPU is seen; give --cpu for a run without one")
    os.environ.update(nccl.environment())
    backend, device = ("gloo", torch.device("cpu")) if arguments.cpu else ("nccl", torch.device("cuda", 0))
    name = platform.machine() if arguments.cpu else torch.cuda.get_device_name(0)
    part_bytes = (arguments.part_mib or (1 if arguments.cpu else 32)) * 2**20
    version = "" if arguments.cpu else f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    sys.stdout.write(
        f"{name}, torch {torch.__version__}{version}, deadline {DEADLINE_S:g} s\n\n"
        "| member | broadcast ends, s | with | closing, s | other released, s | with | next push |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    cases = [(what, when) for what in SIGNALS for when in ("before", "in the midst")]
    members = [(Member(device, part_bytes), Member(device, part_bytes)) for _ in cases]
    all_right = True
    for (what, when), pair in zip(cases, members, strict=True):
        row, is_right = try_case(what, when, pair, device, backend, part_bytes)
        all_right &= is_right
        sys.stdout.write(f"| {' | '.join(row)} | {'' if is_right else '**wrong**'}\n")
        sys.stdout.flush()
    return int(not all_right)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a thread that still closes a group must not hold the process
