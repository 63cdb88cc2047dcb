"""Training runs on a real Ray cluster of several nodes on this machine, with pretended GPUs. Not collected by default:
`make test-ray`.
"""

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from penstock import config as configuration
from penstock.runtime.ports import free_ports
from penstock.testing.train_process import RECIPE, ROOT, started
from services.launch.config import LaunchConfig
from services.launch.on_ray.cluster import Cluster, connected
from services.recipe import Recipe
from tests.e2e.test_killed_processes import assert_nothing_was_lost, overrides
from tests.on_ray.nodes import Nodes, cluster
from tests.support.launch.hosts import missing
from tests.support.processes import is_alive
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.leaves_behind("Ray's nodes and killed processes have no time to remove their files", "file"),
]

_VISIBLE = "CUDA_VISIBLE_DEVICES="


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A cluster whose head has no GPU, and two other nodes two each."""
    with cluster() as started_cluster:
        for _ in range(2):
            started_cluster.add(num_gpus=2)
        yield started_cluster


def on_ray(nodes: Nodes) -> list[str]:
    """The overrides that put a run on the cluster."""
    return ["--launch.backend=ray", f"--launch.ray_address={nodes.address}"]


def placed(folder: Path) -> dict[str, dict[str, Any]]:
    """Where the launcher of a run folder has started each process last."""
    lines = (folder / "logs/launcher.log").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return {each["process"]: each for each in events if each["event"] == "process.placed"}


def require_own_gpus(found: dict[str, dict[str, Any]], wanted: dict[str, int]) -> None:
    """Each process sees as many GPUs of its host as `wanted` says, no other process sees one, and no two the same."""
    seen = {name: visible_gpus(each["pid"]) for name, each in found.items()}
    assert {name: len(gpus) for name, gpus in seen.items() if gpus} == wanted, seen
    held = [(found[name]["node"], gpu) for name, gpus in seen.items() for gpu in gpus]
    assert len(held) == len({*held}), held


def visible_gpus(pid: int) -> list[str]:
    """What CUDA_VISIBLE_DEVICES of a running process names."""
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    (value,) = [each.removeprefix(_VISIBLE) for each in variables if each.startswith(_VISIBLE)]
    return value.split(",") if value else []


def penstock(*arguments: object) -> "subprocess.CompletedProcess[str]":
    """Run a command as a person does, in the tree under test."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", "services.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": paths},
    )


def test_a_run_loses_a_host_and_gains_processes(tmp_path: Path, nodes: Nodes) -> None:
    """The host of the trainer dies, with all that runs there: the run goes on elsewhere, engines and a worker join and
    leave, and each group is trained once. Logs, spans and samples are in the run folder."""
    num_steps = 100
    settings = overrides(tmp_path, rollout__replicas=3, trainer__num_steps=num_steps)
    with started(tmp_path, str(RECIPE), *settings, *on_ray(nodes)) as train:
        train.wait_for_step(3, timeout_s=300)
        before = placed(train.folder)
        engines = {f"rollout-{number}": 1 for number in range(3)}
        assert {"nats", "router", "reward", *engines, "trainer", "worker-0"} == set(before)
        assert {before[name]["node"] for name in ("nats", "router", "reward")} == {nodes.head}
        assert before["trainer"]["node"] != nodes.head
        require_own_gpus(before, engines | {"trainer": 1})
        victims = [name for name, each in before.items() if each["node"] == before["trainer"]["node"]]
        assert engines.keys() & {*victims}, "the run has all four GPUs of both hosts"
        nodes.kill(before["trainer"]["node"])
        wait_until(lambda: not any(is_alive(before[name]["pid"]) for name in victims))
        assert not [name for name in victims if is_alive(before[name]["pid"])]
        nodes.add(num_gpus=3)
        train.wait_for_step(7, timeout_s=400)
        now = placed(train.folder)
        assert all(now[name]["pid"] != before[name]["pid"] for name in victims)
        train.wait_until(lambda: train.rows()[-1]["num_replicas"] == 3, "three engines", 200)
        require_own_gpus(placed(train.folder), engines | {"trainer": 1})
        more = penstock("scale", train.folder, "rollout=4")
        assert more.returncode == 0, more.stderr
        assert more.stdout == "starting rollout-3\n"
        train.wait_until(lambda: train.rows()[-1]["num_replicas"] == 4, "four engines", 200)
        require_own_gpus(placed(train.folder), engines | {"rollout-3": 1, "trainer": 1})
        more = penstock("scale", train.folder, "worker=2")
        assert more.stdout == "starting worker-1\n", more.stderr
        train.wait_until(lambda: "worker-1" in placed(train.folder), "a second worker", 200)
        fewer = penstock("scale", train.folder, "worker=1")
        assert fewer.stdout == "ending worker-1\n", fewer.stderr
        fewer = penstock("scale", train.folder, "rollout=1")
        assert fewer.stdout == "ending rollout-1, rollout-2, rollout-3\n", fewer.stderr
        assert train.wait(400) == 0, train.tail()
        assert_nothing_was_lost(train.rows(), num_steps)
        assert train.rows()[-1]["num_replicas"] == 1
        assert train.left_behind() == []
        for name in before:
            assert (train.folder / f"logs/{name}.log").stat().st_size, name
        spans = "".join(path.read_text() for path in (train.folder / "trace").glob("*.jsonl"))
        assert all(name in spans for name in ("trainer", "worker-0", "rollout-0", "launcher"))
        assert (train.folder / "episodes/index.jsonl").read_text()
        said = train.output.read_text()
        assert "scale: ending rollout-1, rollout-2, rollout-3" in said
        assert "worker-1 has left the run" in said
        assert "did not stop" not in said


def test_a_killed_launcher_ctrl_c_and_resume(tmp_path: Path, nodes: Nodes) -> None:
    """The launcher is killed with -9, and the resumed one is stopped in order: `--resume` goes on each time, nothing of
    the run stays on any host meanwhile, and each group is trained once. The trainer has two ranks, and their GPUs."""
    num_steps = 8
    settings = overrides(
        tmp_path, rollout__replicas=1, trainer__num_steps=num_steps, trainer__ranks=2, trainer__checkpoint_every=2
    )
    with started(tmp_path, str(RECIPE), *settings, *on_ray(nodes)) as train:
        train.wait_for_step(3, timeout_s=300)
        found = placed(train.folder)
        assert len(found) == 6
        assert {*train.processes()} == {*found, "rank-1"}
        require_own_gpus(found, {"rollout-0": 1, "trainer": 2})
        train.process.kill()
        assert train.wait(10) == -signal.SIGKILL
        assert train.left_behind() == []
        folder = train.folder
    with started(tmp_path, "--resume", str(folder)) as train:
        train.wait_for_step(5, timeout_s=300)
        train.process.send_signal(signal.SIGINT)
        assert train.wait(200) == 130, train.tail()
        assert train.left_behind() == []
        assert "did not stop" not in train.output.read_text()
    with started(tmp_path, "--resume", str(folder)) as train:
        assert train.wait(400) == 0, train.tail()
        assert_nothing_was_lost(train.rows(), num_steps)


def test_what_a_cluster_lacks_is_named_before_anything_starts(tmp_path: Path, nodes: Nodes) -> None:
    """Too few GPUs, one host's other version, a model that is on none: no run folder is left."""
    wanted = ["train", RECIPE, f"--run.dir={tmp_path}/runs", *on_ray(nodes)]
    few = penstock(*wanted, "--rollout.replicas=40")
    assert few.returncode == 2
    assert (
        "error: 40 engines with rollout.tensor_parallel = 1, each on one host, and a trainer with 1 GPUs do"
        in few.stderr
    )
    assert "lower the number of engines (rollout.replicas, prefill, decode), or add hosts" in few.stderr
    other = tmp_path / "other" / "penstock-9.9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock\nVersion: 9.9.9\n")
    paths = os.pathsep.join([str(other.parent), os.environ["PYTHONPATH"]])
    stranger = nodes.add(num_gpus=4, environment={"PYTHONPATH": paths})
    seen = penstock(*wanted, "--dry-run", "--rollout.replicas=1")
    assert "is left out: penstock 9.9.9 is there, 0.1.0 here; install the same version" in seen.stdout
    nodes.kill(stranger)
    missing = penstock(*wanted, f"--model.path={tmp_path}/nowhere", "--rollout.replicas=1")
    assert missing.returncode == 2
    assert f"{tmp_path}/nowhere" in missing.stderr
    assert "no host can run" in missing.stderr
    assert not list((tmp_path / "runs").glob("*"))


def test_a_host_that_does_not_see_the_run_folder_is_named(tmp_path: Path, nodes: Nodes) -> None:
    """The plan says that no trainer may be there, and a trainer that only this host has GPUs for is refused before
    anything starts."""
    assert missing(("mount",), packages="mount") == "", missing(("mount",), packages="mount")
    runs = tmp_path / "runs"
    runs.mkdir()
    blind = nodes.add(num_gpus=6, hidden=runs)
    wanted = ["train", RECIPE, f"--run.dir={runs}", *on_ray(nodes), "--rollout.replicas=1"]
    try:
        planned = penstock(*wanted, "--dry-run")
        refused = penstock(*wanted, "--trainer.ranks=6")
    finally:
        nodes.kill(blind)
    assert planned.stdout.count("does not see the run folder: no trainer there") == 1, planned.stdout
    assert refused.returncode == 2
    said = re.search(
        r"trainer\.ranks = 6 needs 6 GPUs of one host .* with it: (.*?); GPUs by host: (.*?);", refused.stderr
    )
    assert said is not None, refused.stderr
    assert len(said[1].split(", ")) == len(said[2].split(", ")) - 1, "every host but one sees it"
    assert list(runs.iterdir()) == []


@pytest.mark.leaves_behind("Ray keeps a driver's log and a socket open after its shutdown", "descriptor")
async def test_a_host_that_was_mended_is_used(tmp_path: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that refuses everything is examined again, and only what it refused."""
    other = tmp_path / "other" / "penstock-9.9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock\nVersion: 9.9.9\n")
    paths = os.pathsep.join([str(other.parent), os.environ["PYTHONPATH"]])
    stranger = nodes.add(num_gpus=4, environment={"PYTHONPATH": paths})
    said: list[str] = []
    with connected(LaunchConfig(backend="ray", ray_address=nodes.address)):
        hosts = Cluster(configuration.load(Recipe, [RECIPE]), tmp_path)
        await hosts.look()
        assert [host.node_id for host in hosts.hosts if host.unfit] == [stranger]
        hosts.report = said.append
        await hosts.look()
        assert said == []
        shutil.rmtree(other)
        monkeypatch.setattr("services.launch.on_ray.cluster._AGAIN_AFTER_S", 0.0)
        await hosts.look()
        assert [host.unfit for host in hosts.hosts] == [""] * len(hosts.hosts)
        (line,) = said
        assert line.endswith(": 4 GPUs, 4 CPUs")
    nodes.kill(stranger)


def test_a_cluster_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its setting, with what to do; within seconds."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    wanted = ["train", RECIPE, f"--run.dir={tmp_path}/runs", "--launch.backend=ray"]
    nobody = penstock(*wanted, "--launch.ray_address=127.0.0.1:1")
    assert nobody.returncode == 2
    assert "launch.ray_address = '127.0.0.1:1': no Ray cluster answers at 127.0.0.1:1" in nobody.stderr
    client = penstock(*wanted, "--launch.ray_address=ray://head:10001")
    assert (client.returncode, "ray job submit" in client.stderr) == (2, True)
    assert not (tmp_path / "runs").exists()


_ENVIRONMENT = """
from penstock.environments import Observation, StepResult


class Mine:
    async def reset(self, task):
        return Observation(messages=task.messages, images=task.images)

    async def step(self, turn):
        return StepResult(observation=None, reward=float(len(turn.text) % 2))

    async def close(self):
        pass
"""
_RECIPE = """
[run]
name = "submitted"

[trainer]
num_steps = 1000
groups_per_step = 8

[rollout]
replicas = 1

[worker.environments]
mine = "my_environment:Mine"

[data]
environment = "mine"
"""


def ray_job(nodes: Nodes, what: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `ray job`, which waits for the job's end."""
    command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "job", what]
    return subprocess.run(
        [*command, f"--address=http://{nodes.dashboard}", *arguments], capture_output=True, text=True, timeout=500
    )


def submitted(nodes: Nodes, folder: Path, command: list[str], *options: str) -> "subprocess.CompletedProcess[str]":
    """`ray job submit`; a cluster takes no job in its first seconds, or minutes."""
    for _ in range(120):
        done = ray_job(nodes, "submit", f"--working-dir={folder}", *options, "--", *command)
        if "No available agent" not in done.stdout + done.stderr:
            break
        time.sleep(2)
    return done


def documented_submission() -> tuple[str, str]:
    """The runtime environment with which docs/operation/ray.md submits a job, and what is before its `penstock`."""
    page = (ROOT / "docs/operation/ray.md").read_text()
    found = re.search(r"--runtime-env-json='(.*?)' -- \\\n +(.*?)penstock train", page)
    assert found is not None
    return found[1], found[2].strip()


@contextmanager
def unreaped_orphans() -> Iterator[None]:
    """Have processes that lose their parent stay zombies, as in a container whose first process reaps nothing."""
    prctl, set_child_subreaper = ctypes.CDLL(None).prctl, 36
    prctl(set_child_subreaper, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(set_child_subreaper, 0, 0, 0, 0)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def test_a_submitted_job_brings_its_code_and_recipe(tmp_path: Path) -> None:
    """`ray job submit --working-dir`: the recipe and an environment of the user's own travel to every host. `ray job
    stop` ends the run in order, as docs/operation/ray.md has it, and another job continues it."""
    environment, prefix = documented_submission()
    job, runs = tmp_path / "job", tmp_path / "runs"
    job.mkdir()
    (job / "my_environment.py").write_text(_ENVIRONMENT)
    (job / "mine.toml").write_text(_RECIPE)
    dashboard, agent = free_ports(2)  # the agent's default is taken by the other cluster of this module
    ports = {"dashboard_port": dashboard, "dashboard_agent_listen_port": agent}
    with unreaped_orphans(), cluster(include_dashboard=True, **ports) as nodes:
        nodes.add(num_gpus=2)
        train = [*prefix.split(), sys.executable, "-m", "services.cli", "train"]
        mine = [*train, "tiny-cpu", "mine.toml", "--launch.backend=ray"]
        lost = submitted(nodes, job, mine)
        assert "run.dir = 'runs' is inside the folder of a submitted job" in lost.stdout + lost.stderr
        options = ("--no-wait", "--submission-id=stopped", f"--runtime-env-json={environment}")
        begun = submitted(nodes, job, [*mine, f"--run.dir={runs}"], *options)
        assert begun.returncode == 0, begun.stdout + begun.stderr
        wait_until(lambda: any(path.read_text() for path in runs.glob("submitted-*/metrics.jsonl")), 300)
        (folder,) = runs.glob("submitted-*")
        stopped = ray_job(nodes, "stop", "stopped")
        said = ray_job(nodes, "logs", "stopped").stdout
        assert "Job 'stopped' was stopped" in stopped.stdout + stopped.stderr, said
        assert f"penstock train --resume {folder}" in said
        assert "did not stop" not in said
        assert not [name for name, each in placed(folder).items() if is_alive(each["pid"])]
        num_before = len(steps(folder))
        assert (folder / f"checkpoints/step-{num_before:06d}").is_dir()
        done = submitted(nodes, job, [*train, "--resume", str(folder), f"--trainer.num_steps={num_before + 2}"])
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        assert steps(folder) == [*range(1, num_before + 3)]


def steps(folder: Path) -> list[int]:
    """The steps in a run's metrics."""
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
