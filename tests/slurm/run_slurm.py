"""Runs on a real Slurm of two nodes: `make test-slurm`. Interrupted in every way, nothing is lost or trained twice."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.testing.train_process import RECIPE
from tests.e2e.test_killed_processes import GROUPS_PER_STEP, assert_nothing_was_lost
from tests.slurm.cluster import CPUS, Cluster, missing, running
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.leaves_behind("a process that is killed with -9 has no time to remove its temporary files", "file"),
]

STEP_TIMEOUT_S = 400.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster; without one, the test fails with the reason."""
    if reason := missing():
        pytest.fail(reason)
    with running(tmp_path_factory.mktemp("slurm") / "c") as cluster:
        yield cluster


class Run:
    """A submitted run."""

    def __init__(self, cluster: Cluster, runs: Path, **settings: object) -> None:
        base = {
            "run.dir": runs,
            "trainer.groups_per_step": GROUPS_PER_STEP,
            "trainer.samples_per_group": 4,
            "trainer.checkpoint_every": 1000,  # so that only an orderly end writes one
            "trainer.weight_sync.transport": "broadcast",
            "rollout.replicas": 2,
            "worker.num": 2,
            "slurm.partition": "low",
            "slurm.time": "2:00:00",
            "slurm.signal_s": 600,
            "slurm.cpus_per_node": CPUS,
        }
        given = base | {key.replace("__", "."): value for key, value in settings.items()}
        arguments = [f"--{key}={value}" for key, value in given.items()]
        self.cluster = cluster
        self.shown = cluster.penstock("slurm", RECIPE, "--nodes=2", *arguments)
        (self.folder,) = [path for path in runs.iterdir() if (path / "job.sh").exists()]
        self.job = self.shown.partition("job ")[2].split()[0]

    def rows(self) -> list[dict[str, Any]]:
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_for_steps(self, number: int) -> None:
        """Wait until this many steps are trained while the job runs."""
        ends_at = time.monotonic() + STEP_TIMEOUT_S
        while len(self.rows()) < number:
            state = self.cluster.job(self.job)["JobState"]
            assert state not in ("COMPLETED", "FAILED", "CANCELLED"), f"{state}\n{self.log()}"
            assert time.monotonic() < ends_at, f"{len(self.rows())} of {number} steps\n{self.log()}"
            time.sleep(0.5)

    def wait_for_restart(self, number: int) -> None:
        """Wait until the job waits for its next start, or has begun it."""
        self.cluster.wait_for(self.job, lambda job: int(job["Restarts"]) >= number, f"restart {number}", 200.0)

    def wait_for_end(self, state: str) -> None:
        ended = ("COMPLETED", "FAILED", "CANCELLED")
        self.cluster.wait_for(self.job, lambda job: job["JobState"] in ended, "the end", STEP_TIMEOUT_S)
        assert self.cluster.job(self.job)["JobState"] == state, self.log()

    def log(self) -> str:
        files = [*self.folder.glob("slurm-*.log"), *self.folder.glob("logs/*.log")]
        texts = [f"== {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files]
        return "\n".join([*texts, self.cluster.logs()])

    def wait_for_checkpoint(self, least: int) -> int:
        """Wait for the checkpoint of an orderly end, at this step or a later one, and return its step."""
        wait_until(lambda: self.last_checkpoint() >= least, 90.0)
        assert self.last_checkpoint() >= least, self.log()
        return self.last_checkpoint()

    def last_checkpoint(self) -> int:
        return max((int(path.name[5:]) for path in self.folder.glob("checkpoints/step-*")), default=0)


def test_a_run_is_interrupted_in_every_way_and_loses_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """A job of a higher partition preempts it, its time is over, an operator queues it again, a person ends it and goes
    on by another job. Each time it ends its step, writes a checkpoint, and goes on from there.

    Each node has an engine and a worker, and weights are broadcast between the nodes.
    """
    num_steps = 100
    run = Run(cluster, tmp_path / "runs", trainer__num_steps=num_steps)
    assert f"sbatch {run.folder}/job.sh" in run.shown

    run.wait_for_steps(5)
    urgent = ["--partition=high", "--nodes=2", "--ntasks-per-node=1", f"--cpus-per-task={CPUS}", "--output=/dev/null"]
    cluster.run("sbatch", *urgent, "--wrap=sleep 1")
    run.wait_for_restart(1)
    preempted = run.wait_for_checkpoint(5)

    run.wait_for_steps(preempted + 2)
    hours, minutes, _ = map(int, cluster.job(run.job)["RunTime"].split(":"))
    cluster.run("scontrol", "update", f"JobId={run.job}", f"TimeLimit={60 * hours + minutes + 3}")
    run.wait_for_restart(2)
    cluster.run("scontrol", "update", f"JobId={run.job}", "TimeLimit=120")
    timed_out = run.wait_for_checkpoint(preempted + 2)

    run.wait_for_steps(timed_out + 2)
    cluster.run("scontrol", "requeue", run.job)
    run.wait_for_restart(3)
    queued_again = run.wait_for_checkpoint(timed_out + 2)

    run.wait_for_steps(queued_again + 2)
    cluster.run("scancel", "--batch", "--signal=USR1", run.job)
    run.wait_for_end("FAILED")  # with exit code 130
    ended = run.wait_for_checkpoint(queued_again + 2)

    run.job = cluster.run("sbatch", "--parsable", run.folder / "job.sh").strip()
    run.wait_for_end("COMPLETED")
    rows = run.rows()
    print("interrupted after steps", preempted, timed_out, queued_again, ended)  # noqa: T201 - what was measured
    assert_nothing_was_lost(rows, num_steps)
    assert rows[-1]["trainer_start"] == 5
    assert max(row["push_replicas"] for row in rows) == 2
    assert "node2:" in (run.folder / "logs" / "node2-rollout-0.log").read_text()


def test_a_folder_that_the_nodes_do_not_share_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """Before anything starts."""
    runs = tmp_path / "runs"
    runs.mkdir()
    cluster.run("mount", "-t", "tmpfs", "none", runs, host="node2")
    run = Run(cluster, runs, trainer__num_steps=1)
    run.wait_for_end("FAILED")
    (log,) = run.folder.glob("slurm-*.log")
    wait_until(lambda: "nothing was started" in log.read_text(), 10.0)
    assert f"All of them must see {run.folder}" in log.read_text()
    assert "recipe.toml cannot be read" in log.read_text()
    assert not (run.folder / "logs").exists()
