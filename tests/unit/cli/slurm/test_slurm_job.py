"""What the sbatch file of `penstock slurm` does, with stand-ins for Slurm's commands.

On a real Slurm: `make test-slurm`.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.launch.slurm.placement import NodeShare
from services.launch.slurm.script import job_script
from tests.support.waiting import HANG_S, wait_until
from tests.unit.cli.slurm.test_slurm_command import recipe

PROGRAMS = {
    # Runs the command here, whose process is what Slurm would signal. After `sbatch --export=NONE` it has the variables
    # of the job only with --export=ALL.
    "srun": """
exported=
while [[ $1 == --* ]]; do
  case $1 in
    --nodelist=*) export NODE=${1#*=};;
    --export=ALL) exported=yes;;
  esac
  shift
done
[[ $exported ]] || unset ${!PENSTOCK_@}
[[ ! -e slow_traps ]] || export BASH_ENV=slow_traps
exec "$@"
""",
    "scontrol": 'if [[ $1 == show ]]; then printf "node1\\nnode2\\n"; else echo "scontrol $*" >> calls; fi',
    # The trainer may end before it has.
    "scancel": 'echo "scancel $*" >> calls; exec 2> /dev/null; kill -TERM $(cat trainer.pid node.pid); sleep 0.3',
    "penstock": """
echo "$NODE $1" >> calls
echo "${PENSTOCK_TOKEN:-none}" >> tokens
[[ $2 != --resume ]] || echo resumes >> calls
case $1 in
  doctor) echo "$NODE checks ${2##*/}" >> checks; exit $(cat doctor-$NODE);;
  train)
    echo $PPID > trainer.pid
    trap 'echo told >> calls; [[ -s hold ]] || exit 130' TERM
    [[ -e unseen ]] || touch live.toml
    until [[ -s train ]]; do sleep 0.02; done
    exit $(cat train);;
  slurm-node)
    echo $$ > node.pid
    trap 'stopped=yes' TERM
    until [[ -s node || -e live.toml ]]; do
      [[ -z ${stopped:-} ]] || exit 0
      sleep 0.02
    done
    echo "$NODE serves" >> calls
    until [[ -s node || ! -e live.toml ]]; do sleep 0.02; done
    exit $(cat node 2> /dev/null || echo 0);;
esac
""",
}
"""Stand-ins for what the file calls: they write down that they were called, and exit as files say."""


class Job:
    """A job's file under way."""

    def __init__(self, folder: Path, *, doctor_of_node2: int = 0) -> None:
        self.folder = folder
        for name, text in PROGRAMS.items():
            (folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / name).chmod(0o755)
        self.exits("doctor-node1", 0)
        self.exits("doctor-node2", doctor_of_node2)
        given = recipe(f"--slurm.command={folder}/penstock")
        placed = [NodeShare(unified=1, workers=1), NodeShare(unified=1)]
        (folder / "job.sh").write_text(job_script(given, folder, placed, working_directory=folder))
        self.process = subprocess.Popen(
            ["bash", "job.sh"],
            cwd=folder,
            env={
                **os.environ,
                "PATH": f"{folder}:{os.environ['PATH']}",
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NODELIST": "n",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def exits(self, name: str, code: int) -> None:
        partial = self.folder / f"{name}.partial"
        partial.write_text(f"{code}\n")
        partial.rename(self.folder / name)

    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def until_training(self) -> None:
        wait_until(lambda: "node2 serves" in self.calls())

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=HANG_S)
        return self.process.returncode, output


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start the file of a job in `tmp_path`; what a failing test leaves of it is killed."""
    jobs: list[Job] = []

    def start(**doctor: int) -> Job:
        jobs.append(Job(tmp_path, **doctor))
        return jobs[-1]

    yield start
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.communicate()


def test_a_finished_run_ends_the_job(tmp_path: Path, start: Callable[..., Job]) -> None:
    """The nodes are compared, then all start; the others end with the trainer."""
    job = start()
    job.until_training()
    job.exits("train", 0)
    assert job.end() == (0, "")
    assert sorted(job.calls()[:2]) == ["node1 doctor", "node2 doctor"]
    started = [
        call for call in job.calls()[2:] if not call.startswith("scancel")
    ]  # nodes that are slow to end are told
    assert sorted(started) == ["node1 train", "node2 serves", "node2 slurm-node"]
    assert not (tmp_path / "live.toml").exists()


def test_all_processes_have_the_token_of_the_job(
    tmp_path: Path, start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it their ports are open; `sbatch --export=NONE` would have srun leave it out."""
    for name in ("PENSTOCK_TOKEN", "PENSTOCK_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    job = start()
    job.until_training()
    job.exits("train", 0)
    assert job.end()[0] == 0
    tokens = (tmp_path / "tokens").read_text().split()
    assert len(tokens) == 4
    assert len({*tokens}) == 1
    assert len(tokens[0]) == 64


def test_a_trainer_that_cannot_start_ends_the_job(tmp_path: Path, start: Callable[..., Job]) -> None:
    """With its code, although the other node still waits for the addresses of the run."""
    (tmp_path / "unseen").touch()
    job = start()
    wait_until(lambda: "node2 slurm-node" in job.calls())
    job.exits("train", 2)
    assert job.end() == (2, "")
    assert "scancel --signal=TERM 7" in job.calls()


def test_the_addresses_of_a_run_that_another_job_has_stay(tmp_path: Path, start: Callable[..., Job]) -> None:
    """Its nodes would take their absence for the end of the run."""
    (tmp_path / "live.toml").touch()
    (tmp_path / "unseen").touch()  # the trainer is refused before it writes any
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        job = start()
        wait_until(lambda: "node2 serves" in job.calls())
        job.exits("train", 2)
        job.exits("node", 0)
        assert job.end()[0] == 2
        assert (tmp_path / "live.toml").exists()


def test_an_interrupted_run_is_queued_again(tmp_path: Path, start: Callable[..., Job]) -> None:
    """Slurm has told the processes to end, and not the file: it asks for the next start itself, which resumes."""
    job = start()
    job.until_training()
    (tmp_path / "config.toml").touch()  # as the trainer's node does
    job.exits("train", 130)
    code, output = job.end()
    assert code == 130
    assert "queued again" in output
    assert job.calls()[-1] == "scontrol requeue 7"
    assert "resumes" not in job.calls()
    job.exits("node", 0)
    (tmp_path / "recipe.toml").touch()
    for later_s, is_warned in ((60, False), (-60, True)):
        written = time.time() + later_s
        os.utime(tmp_path / "config.toml", (written, written))
        job = start()  # the exit codes are still there
        code, output = job.end()
        assert code == 130
        assert ("what was changed in recipe.toml has no effect" in output) == is_warned
        checks = (tmp_path / "checks").read_text().split("\n")
        assert sorted(checks[-3:-1]) == ["node1 checks config.toml", "node2 checks config.toml"]
    assert "resumes" in job.calls()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_job_that_is_told_to_end_is_not_queued_again(start: Callable[..., Job], number: signal.Signals) -> None:
    """SIGTERM: Slurm cancels it or queues it again itself. SIGUSR1, from a person, is passed on to the trainer."""
    job = start()
    job.until_training()
    job.process.send_signal(number)
    if number is signal.SIGTERM:
        time.sleep(0.2)
        assert job.process.poll() is None  # it waits for the checkpoint
        assert "scancel --signal=TERM 7" not in job.calls()  # after the trainer, nodes that are slow to end are told
        job.exits("train", 130)
    assert job.end()[0] == 130
    assert number is signal.SIGTERM or "scancel --signal=TERM 7" in job.calls()
    assert not any("requeue" in call for call in job.calls())


def test_a_second_signal_changes_nothing(start: Callable[..., Job]) -> None:
    """Slurm may send one for a preemption and one for the time limit; the trainer would end at the second at once."""
    job = start()
    job.exits("hold", 1)  # it is in the middle of a step
    job.until_training()
    for number in (1, 2):
        job.process.send_signal(signal.SIGUSR1)
        wait_until(lambda number=number: job.calls().count("scancel --signal=TERM 7") == number)
        wait_until(lambda: "told" in job.calls())
    time.sleep(0.2)
    job.exits("train", 130)
    assert job.end()[0] == 130
    assert job.calls().count("told") == 1


def test_a_signal_in_the_moment_of_a_start_is_passed_on(tmp_path: Path, start: Callable[..., Job]) -> None:
    """The script that waits for the trainer is slow: it has no time after the trainer's start before the signal."""
    (tmp_path / "slow_traps").write_text(
        """
unset BASH_ENV
set -T
trap '[[ $BASH_COMMAND != trap* ]] || sleep 1' DEBUG
"""
    )
    job = start()
    job.until_training()
    job.process.send_signal(signal.SIGUSR1)
    assert job.end()[0] == 130
    assert "told" in job.calls()


def test_a_node_that_fails_ends_the_run(start: Callable[..., Job]) -> None:
    """In order, and without a next start, which would fail as well."""
    job = start()
    job.until_training()
    job.exits("node", 2)
    code, output = job.end()
    assert code == 2
    assert "a node has failed" in output
    assert "scancel --signal=TERM 7" in job.calls()


@pytest.mark.parametrize(("exit_code", "is_requeued"), [(1, False), (143, True)])
def test_nodes_that_do_not_fit_start_nothing(start: Callable[..., Job], exit_code: int, is_requeued: bool) -> None:
    """The doctor's reasons are above; a preemption at that moment is none of them."""
    job = start(doctor_of_node2=exit_code)
    code, output = job.end()
    assert "node1 train" not in job.calls()
    assert code == (exit_code if is_requeued else 2)
    assert ("nothing was started" in output) == (not is_requeued)
    assert ("scontrol requeue 7" in job.calls()) == is_requeued


def test_another_number_of_nodes_is_refused(tmp_path: Path) -> None:
    """`sbatch --nodes=2` of a file for one."""
    (tmp_path / "scontrol").write_text(f"#!/bin/bash\n{PROGRAMS['scontrol']}\n")
    (tmp_path / "scontrol").chmod(0o755)
    script = job_script(recipe(), tmp_path, [NodeShare(unified=1, workers=1)], working_directory=tmp_path)
    done = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    remedy = f"give sbatch --nodes=1, or change --nodes and shares=() in {tmp_path}/job.sh, which has a line for each"
    assert f"the job has 2 nodes, and this file is for 1; {remedy}" in done.stderr
