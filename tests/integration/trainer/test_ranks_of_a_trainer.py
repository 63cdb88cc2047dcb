"""A trainer's ranks as real processes: they take its steps, and none outlives or outwaits another."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from penstock.runtime.ports import held_ports
from services.trainer.backend.base import take_step
from services.trainer.backend.ranks.ranks import ALONE
from services.trainer.checkpoint.store import CheckpointStore
from tests.conftest import ROOT
from tests.support.trainer.families import heard, random_qwen3_vl_moe, write_model
from tests.support.trainer.ranks.ranked_groups import VERSION, groups_of
from tests.support.waiting import wait_until
from tests.unit.backend.ranks.test_ranks import backend_of

_MODULE = "tests.support.trainer.ranks.ranks_trainer"


class Trainer:
    """Rank 0, which says whom it has started: the other, or under torchrun nobody."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self._started = self._answer()

    @property
    def pid_of_rank_1(self) -> int:
        """Process id of the other, which it has started."""
        [pid] = self._started
        return int(pid)

    def ask(self, command: str) -> Any:
        """Give a command, and return the answer."""
        self.tell(command)
        return self._answer()

    def tell(self, command: str) -> None:
        """Give a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@contextmanager
def trainer(model: Path, *options: str) -> Iterator[Trainer]:
    """Two ranks."""
    command = [sys.executable, "-m", _MODULE, str(model), "2", *options]
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            yield Trainer(process)
        finally:
            process.kill()


def is_gone(pid: int) -> bool:
    """Whether no such process is left, other than as a zombie; what is killed with its parent takes a moment to end."""

    def has_ended() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_until(has_ended)
    return has_ended()


@pytest.fixture(params=["dense", pytest.param("mixture", marks=pytest.mark.variant)])
def model(request: pytest.FixtureRequest, tiny_model_path: Path, tmp_path: Path) -> Path:
    """A dense one, and one whose experts the ranks divide."""
    if request.param == "dense":
        return tiny_model_path
    return write_model(heard(random_qwen3_vl_moe(), std_of_embedding=0.3), tmp_path / "mixture")


@pytest.mark.slow
def test_ranks_take_the_trainers_steps_and_end_with_it(model: Path, tmp_path: Path) -> None:
    """Its checkpoint is that of one rank; killed in whichever way, it leaves nobody behind."""
    backend = backend_of(ALONE, model)
    groups = groups_of(model, seed=0)
    alone = take_step(backend, [groups[:1], groups[1:]], VERSION)
    with trainer(model) as started:
        # Where they find each other is there still: for a slower rank, and for NCCL, which looks when it is first used.
        assert started.ask("meet") == 1
        assert started.ask("load") == backend_of(ALONE, model).digests().weights
        loss, digest = started.ask("step 0")
        assert loss == pytest.approx(alone["loss"], rel=1e-3)
        (tmp_path / "saved").mkdir()
        started.ask(f"save {tmp_path / 'saved'}")
        resumed = backend_of(ALONE, model, tmp_path / "saved")
        assert resumed.digests().weights == digest
        weights = dict(resumed.export())
        for name, weight in backend.export():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=2e-6)
        started.process.kill()
        assert is_gone(started.pid_of_rank_1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blow", "reason"),
    [
        (signal.SIGSTOP, "gave no sign of life for 15 s"),
        pytest.param(signal.SIGKILL, "was killed by signal 9", marks=pytest.mark.variant),  # as where all write
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_trainer(tiny_model_path: Path, blow: signal.Signals, reason: str) -> None:
    """In the middle of a step, though nothing of it is being computed, and with the reason in its log."""
    with trainer(tiny_model_path, "--silence-s=15", "--odd=keeps up") as started:
        started.ask("load")
        started.ask("begin")
        os.kill(started.pid_of_rank_1, blow)
        assert started.process.wait(60.0) == 1
        assert started.process.stderr is not None
        assert f"rank 1 {reason}" in started.process.stderr.read()
        assert is_gone(started.pid_of_rank_1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("odd", "stall_s", "reason"),
    [
        pytest.param(
            "sleeps",
            4,
            "rank 1 did not move for 4 s while others waited in the command begin_step",
            marks=pytest.mark.variant,  # as torchrun's ranks below
        ),
        pytest.param(
            "refuses",
            60,
            "rank 1 alone refused the command begin_step: this rank is odd",
            marks=pytest.mark.variant,  # tests/unit/backend/ranks/life/test_beats.py
        ),
    ],
)
def test_a_rank_that_does_not_come_to_the_others_ends_the_trainer(
    tiny_model_path: Path, odd: str, stall_s: int, reason: str
) -> None:
    """It lives, and its heart beats; a rank that refused, as none of the others did, says why."""
    with trainer(tiny_model_path, f"--stall-s={stall_s}", f"--odd={odd}") as started:
        started.ask("load")
        started.tell("begin")
        assert started.process.wait(60.0) == 1
        assert started.process.stderr is not None
        assert reason in started.process.stderr.read()
        assert is_gone(started.pid_of_rank_1)


@pytest.mark.slow
@pytest.mark.variant  # tests/unit/backend/ranks/life/test_beats.py
def test_ranks_wait_for_one_that_computes(tiny_model_path: Path) -> None:
    """Twice as long as for one that does not move."""
    with trainer(tiny_model_path, "--stall-s=4", "--odd=computes") as started:
        started.ask("load")
        assert started.ask("begin") == "begun"


@pytest.mark.slow
def test_a_rank_that_cannot_begin_ends_the_trainer(tiny_model_path: Path) -> None:
    """With its reason."""
    with trainer(tiny_model_path, "--odd=refuses to begin") as started:
        started.tell("load")
        assert started.process.wait(60.0) == 1
        assert started.process.stderr is not None
        said = started.process.stderr.read()
        assert "this machine is odd" in said
        assert "rank 1 ended with 1" in said


@pytest.mark.slow
@pytest.mark.parametrize("killed", [pytest.param("rank 0", marks=pytest.mark.variant), "rank 1"])
def test_a_rank_killed_while_all_write_leaves_the_checkpoint_before(
    tiny_model_path: Path, tmp_path: Path, killed: str
) -> None:
    """Kill -9 when files of the second checkpoint are there: what it leaves is never taken for one."""
    with trainer(tiny_model_path) as started:
        started.ask("load")
        _, digest = started.ask("step 0")
        assert started.ask(f"checkpoint {tmp_path} 1 0") == "saved"
        started.ask("step 1")
        started.tell(f"checkpoint {tmp_path} 2 60")
        wait_until(lambda: any(tmp_path.glob(".step-000002.*.partial/trainer.pt")))
        assert [*tmp_path.glob(".step-000002.*.partial/trainer.pt")]
        os.kill(started.process.pid if killed == "rank 0" else started.pid_of_rank_1, signal.SIGKILL)
        assert started.process.wait(60.0) == (-signal.SIGKILL if killed == "rank 0" else 1)
        assert started.process.stderr is not None
        assert ("rank 1 was killed by signal 9" in started.process.stderr.read()) is (killed == "rank 1")
        assert is_gone(started.pid_of_rank_1)
    store = CheckpointStore(tmp_path, keep=2)
    assert [*tmp_path.glob(".step-000002.*.partial")]
    store.claim()
    latest = store.latest()
    assert latest is not None
    assert latest.step == 1
    assert backend_of(ALONE, tiny_model_path, latest.path).digests().weights == digest
    store.save(2, {}, lambda folder: (folder / "file").touch())
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".writer")) == [
        "latest",
        "step-000001",
        "step-000002",
    ]


def own_files(folder: Path) -> dict[str, str]:
    """The environment of a torchrun that leaves its files in a folder."""
    return {**os.environ, "TMPDIR": str(folder)}


def two_machines(model: Path, folder: Path, *arguments: str) -> tuple[list[int | None], list[str], list[str]]:
    """Exit codes, outputs and errors of a trainer of two ranks, each of which torchrun starts as on its own machine."""
    with held_ports(1) as (port,), contextlib.ExitStack() as stack:
        machines = [
            stack.enter_context(
                subprocess.Popen(
                    [
                        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}"),
                        *("--master-addr=127.0.0.1", f"--master-port={port}", "--nproc-per-node=1"),
                        *("-m", _MODULE, str(model), "1", *arguments),
                    ],
                    cwd=ROOT, env=own_files(folder), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )
            )
            for number in range(2)
        ]  # fmt: skip
        try:
            said = [machine.communicate(timeout=180) for machine in machines]
        finally:
            for machine in machines:
                machine.kill()
    return [machine.returncode for machine in machines], [out for out, _ in said], [err for _, err in said]


@pytest.mark.slow
def test_torchrun_starts_ranks_of_two_machines(tiny_model_path: Path, tmp_path: Path) -> None:
    """Each as the trainer is started; the other machine's follows the first to its end."""
    backend = backend_of(ALONE, tiny_model_path)
    groups = groups_of(tiny_model_path, seed=0)
    alone = take_step(backend, [groups[:1], groups[1:]], VERSION)
    codes, outputs, errors = two_machines(tiny_model_path, tmp_path, "load;step 0;close")
    assert codes == [0, 0], errors
    _, _, step, closed = (json.loads(line) for line in outputs[0].splitlines())
    assert step[0] == pytest.approx(alone["loss"], rel=1e-3)
    assert (closed, outputs[1]) == ("closed", "")


@pytest.mark.slow
def test_torchruns_ranks_hear_of_each_other(tiny_model_path: Path, tmp_path: Path) -> None:
    """Rank 0 of one that does not come, and the other machine's rank of the end of rank 0."""
    codes, _, errors = two_machines(tiny_model_path, tmp_path, "load;begin", "--stall-s=4", "--odd=sleeps")
    assert codes == [1, 1], errors
    assert "rank 1 did not move for 4 s while others waited in the command begin_step" in errors[0]
    assert "rank.left" in errors[1]


@pytest.mark.slow
def test_torchrun_restarts_ranks_that_go_on_from_the_checkpoint(tiny_model_path: Path, tmp_path: Path) -> None:
    """All of them, after kill -9 of one, and however late rank 0 joins; the next step is then that of one rank."""
    backend = backend_of(ALONE, tiny_model_path)
    for seed in range(2):
        groups = groups_of(tiny_model_path, seed=seed)
        alone = take_step(backend, [groups[:1], groups[1:]], VERSION + seed)
    options = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "-m", _MODULE]
    with subprocess.Popen(
        [sys.executable, *options, str(tiny_model_path), "1", "--late-s=5"],
        cwd=ROOT, env=own_files(tmp_path), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            started = Trainer(process)
            started.ask("load")
            _, digest = started.ask("step 0")
            assert started.ask(f"checkpoint {tmp_path} 1 0") == "saved"
            [rank_1] = [each for each in psutil.Process(process.pid).children() if each.environ()["RANK"] == "1"]
            rank_1.kill()
            restarted = Trainer(process)
            assert restarted.ask(f"load {tmp_path / 'step-000001'}") == digest
            assert restarted.ask("step 1")[0] == pytest.approx(alone["loss"], rel=1e-3)
            assert restarted.ask("close") == "closed"
            assert process.wait(60.0) == 0
        finally:
            process.kill()
