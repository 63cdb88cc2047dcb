"""What `penstock slurm` writes and refuses, and what its sbatch file does; on a real Slurm: `make test-slurm`."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.config import load
from penstock.errors import ConfigError, SetupError
from services.launch.slurm import submission
from services.launch.slurm.node import addresses_of_first, plan_node
from services.launch.slurm.placement import NodeShare, place
from services.launch.slurm.script import job_script
from services.recipe import Recipe
from tests.support.waiting import HANG_S, wait_until
from tests.unit.cli.test_cli import assert_mistake, penstock


def recipe(*overrides: str) -> Recipe:
    return load(Recipe, [], overrides)


def shares(recipe: Recipe, num_nodes: int) -> list[tuple[int, int, int, int]]:
    placed = place(recipe, num_nodes=num_nodes)
    return [(each.unified, each.prefill, each.decode, each.workers) for each in placed]


@pytest.mark.parametrize(
    ("overrides", "num_nodes", "expected"),
    [
        ("--rollout.replicas=2", 1, [(2, 0, 0, 1)]),
        ("--rollout.replicas=2", 2, [(1, 0, 0, 1), (1, 0, 0, 0)]),
        ("--rollout.replicas=1", 3, [(0, 0, 0, 1), (1, 0, 0, 0), (0, 0, 0, 0)]),
        ("--rollout.replicas=5 --worker.num=4", 3, [(1, 0, 0, 2), (2, 0, 0, 1), (2, 0, 0, 1)]),
        ("--rollout.replicas=8 --slurm.gpus_per_node=8 --trainer.ranks=8", 2, [(0, 0, 0, 1), (8, 0, 0, 0)]),
        ("--rollout.replicas=12 --slurm.gpus_per_node=8 --trainer.ranks=4", 2, [(4, 0, 0, 1), (8, 0, 0, 0)]),
        ("--rollout.replicas=7 --slurm.gpus_per_node=8 --rollout.tensor_parallel=2", 2, [(3, 0, 0, 1), (4, 0, 0, 0)]),
        ("--rollout.replicas=16 --slurm.gpus_per_node=8 --trainer.device=cpu", 2, [(8, 0, 0, 1), (8, 0, 0, 0)]),
        ("--rollout.replicas=0 --rollout.prefill=2 --rollout.decode=2", 2, [(0, 1, 1, 1), (0, 1, 1, 0)]),
        ("--rollout.replicas=0 --rollout.prefill=1 --rollout.decode=2", 2, [(0, 0, 0, 1), (0, 1, 2, 0)]),
        ("--rollout.replicas=1 --rollout.prefill=1 --rollout.decode=2", 2, [(0, 0, 0, 1), (1, 1, 2, 0)]),
    ],
)
def test_engines_are_divided_among_nodes(
    overrides: str, num_nodes: int, expected: list[tuple[int, int, int, int]]
) -> None:
    """In turn, the first node last, beside the trainer's ranks; never more than fit, and no decode engine alone on the
    first node, whose recipe would be refused."""
    assert shares(recipe(*overrides.split()), num_nodes) == expected


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            "--rollout.replicas=16 --slurm.gpus_per_node=8",
            "16 engines with rollout.tensor_parallel = 1 do not fit 2 nodes with slurm.gpus_per_node = 8, which have "
            "room for 15 beside the trainer's 1; lower the number of engines",
        ),
        ("--trainer.ranks=16 --slurm.gpus_per_node=8", "trainer.ranks = 16: .* lower it to at most 8"),
        (
            "--rollout.replicas=0 --rollout.prefill=2 --rollout.decode=1 --slurm.gpus_per_node=2",
            "prefill = 2 and decode = 1 cannot be divided among 2 nodes",
        ),
    ],
)
def test_what_does_not_fit_is_refused(overrides: str, words: str) -> None:
    """With the numbers, and what to change."""
    with pytest.raises(ConfigError, match=words):
        place(recipe(*overrides.split()), num_nodes=2)


def test_each_engine_of_a_node_has_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that Slurm shows the node, none of them twice; workers compute on the CPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    node = recipe("--rollout.tensor_parallel=2", "--network.host=0.0.0.0", "--network.advertise_host=node2")
    network = ["--network.host=0.0.0.0", "--network.advertise_host=node2"]
    plan = plan_node(node, NodeShare(unified=2, workers=1), network)
    assert plan.gpus.of_process == {"node2-rollout-0": ("4", "5"), "node2-rollout-1": ("6", "7")}
    assert plan.gpus.environment("node2-worker-0") == {"CUDA_VISIBLE_DEVICES": ""}
    assert [process.address for process in plan.processes] == ["127.0.0.1:0"] * 3  # for this node's own checks
    assert all(set(network) <= set(process.overrides) for process in plan.processes)
    with pytest.raises(ConfigError, match=r"3 engines with rollout.tensor_parallel = 2 need 6 GPUs, and 4 can be used"):
        plan_node(node, NodeShare(unified=3), network)


def test_workers_of_other_nodes_find_the_services_of_the_first() -> None:
    """Where the recipe says nothing; an address that it gives stays."""
    opened = ("--network.host=0.0.0.0", "--network.advertise_host=node1")
    live = recipe(*opened, "--router.port=7001", "--reward.port=7002")
    assert [*addresses_of_first(live)] == ["--worker.router_address=node1:7001", "--worker.reward_address=node1:7002"]
    live = recipe(*opened, "--router.port=7001", "--router.http_port=7080", "--worker.reward_address=away:1")
    assert [*addresses_of_first(live)] == ["--worker.router_address=node1:7001"]
    agent = "--worker.agents.mine.function=examples.retry_agent:play"
    live = recipe(*opened, "--router.http_port=7080", "--worker.reward_address=away:1", agent)
    assert [*addresses_of_first(live)][1] == "--worker.router_url=http://node1:7080"


def options(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_settings_become_options_of_sbatch(tmp_path: Path) -> None:
    """Those of [slurm], and the user's own last, so that they win."""
    given = recipe(
        "--run.name=mine",
        "--slurm.partition=gpu",
        "--slurm.account=me",
        "--slurm.time=1-00:00:00",
        "--slurm.gpus_per_node=8",
        "--slurm.cpus_per_node=64",
        "--slurm.signal_s=600",
        '--slurm.options=["--constraint=h100", "--mem=0"]',
        '--slurm.setup=["module load cuda"]',
        "--slurm.container_image=/images/a b.sqsh",
        '--slurm.container_mounts=["/shared", "/a:/b"]',
    )
    script = job_script(
        given, tmp_path / "run", [NodeShare(workers=1), NodeShare(unified=8)], working_directory=tmp_path
    )
    assert options(script) == [
        "--job-name=mine",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--cpus-per-task=64",
        "--partition=gpu",
        "--account=me",
        "--time=1-00:00:00",
        "--requeue",
        "--signal=TERM@600",
        f"--chdir={tmp_path}",
        f"--output={tmp_path}/run/slurm-%j.log",
        "--open-mode=append",
        "--constraint=h100",
        "--mem=0",
    ]
    assert "\nmodule load cuda\n" in script
    assert "\npenstock=(penstock)\n" in script
    assert '  "--rollout.replicas=0 --rollout.prefill=0 --rollout.decode=0 --worker.num=1"\n  "--unified=8"\n' in script
    assert (
        f"--cpu-bind=none --gpus-per-node=8 --container-image='/images/a b.sqsh' --container-workdir={tmp_path} "
        "--container-mounts=/shared,/a:/b"
    ) in script
    assert "@{" not in script


def test_without_settings_the_nodes_are_whole_and_the_job_is_requeued(tmp_path: Path) -> None:
    """`slurm.requeue = false` says how to continue instead."""
    script = job_script(recipe(), tmp_path, [NodeShare(unified=1, workers=1)], working_directory=tmp_path)
    assert {"--exclusive", "--requeue", "--signal=TERM@300"} < set(options(script))
    assert "scontrol requeue" in script
    script = job_script(
        recipe("--slurm.requeue=false"), tmp_path, [NodeShare(unified=1, workers=1)], working_directory=tmp_path
    )
    assert "--no-requeue" in options(script)
    assert "scontrol requeue" not in script


def test_a_dry_run_writes_what_would_be_submitted(tmp_path: Path) -> None:
    """A run folder with the recipe, all settings resolved, and the file; nothing is asked of Slurm."""
    shown = penstock("slurm", "tiny-cpu", "--nodes=2", "--dry-run", f"--run.dir={tmp_path}", "--worker.num=2")
    assert (shown.returncode, shown.stderr) == (0, "")
    (folder,) = tmp_path.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["job.sh", "recipe.toml"]
    written = load(Recipe, [folder / "recipe.toml"])
    assert (written.rollout.replicas, written.worker.num) == (2, 2)
    script = folder / "job.sh"
    subprocess.run(["bash", "-n", script], check=True)
    assert f"node 2: 1 engine, 1 worker\nnot submitted; read {script}, then `sbatch {script}`\n" in shown.stdout
    assert f"\nrun={folder}\n" in script.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--slurm.partitoin=x",), ("slurm.partitoin", "did you mean slurm.partition?")),
        (("--slurm.time=tomorrow",), ("slurm.time = 'tomorrow'",)),
        (('--slurm.options=["constraint=h100"]',), ("'constraint=h100' is not an option of sbatch",)),
        (('--slurm.options=["--nodes=4"]',), ("give the number of nodes as `penstock slurm --nodes`",)),
        (('--slurm.options=["--signal=USR1"]',), ("is set by `penstock slurm` itself",)),
        (("--slurm.time=5",), ("time = '5' is over before signal_s = 300", "lower signal_s")),
        (("--slurm.time=0-0:4",), ("is over before signal_s",)),
        (('--slurm.container_mounts=["/a"]',), ("no effect without container_image",)),
        (("--trainer.device=cuda",), ("trainer.device = 'cuda', and slurm.gpus_per_node = 0",)),
        (("--rollout.replicas=20", "--slurm.gpus_per_node=8"), ("20 engines", "room for 15")),
        (("--launch.backend=ray",), ("launch.backend = 'ray'", "leave it out")),
        (("--data.profile=mth",), ("data.profile = 'mth' is unknown", "did you mean 'math'?")),
        (("--metrics.port=9400",), ("metrics.port = 9400",)),
    ],
)
def test_mistakes_are_named_before_anything_is_submitted(
    tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """And no run folder is left."""
    runs = tmp_path / "runs"
    result = penstock("slurm", "tiny-cpu", "--nodes=2", "--dry-run", f"--run.dir={runs}", *arguments)
    assert_mistake(result, *words)
    assert not runs.exists()


def test_without_sbatch_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command belongs on a login node, or gets --dry-run."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_mistake(penstock("slurm", "tiny-cpu", f"--run.dir={tmp_path}/runs"), "no sbatch on PATH", "--dry-run")
    assert not (tmp_path / "runs").exists()


def test_what_slurm_refuses_is_told_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And how to submit the file again."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpu' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(
        SetupError, match=r"Slurm refuses the job: invalid partition specified: gpu; correct it in /x/job"
    ):
        submission.submit(Path("/x/job.sh"))


def test_a_node_without_the_run_folder_says_so(tmp_path: Path) -> None:
    """Its path is not shared."""
    assert_mistake(penstock("slurm-node", tmp_path / "run"), f"recipe {tmp_path}/run/recipe.toml cannot be read")


PROGRAMS = {
    # Runs the command here, whose process is what Slurm would signal.
    "srun": 'while [[ $1 == --* ]]; do [[ $1 != --nodelist=* ]] || export NODE=${1#*=}; shift; done; exec "$@"',
    "scontrol": 'if [[ $1 == show ]]; then printf "node1\\nnode2\\n"; else echo "scontrol $*" >> calls; fi',
    # The trainer may end before it has.
    "scancel": 'echo "scancel $*" >> calls; kill -TERM $(cat trainer.pid); sleep 0.3',
    "penstock": """
echo "$NODE $1" >> calls
[[ $2 != --resume ]] || echo resumes >> calls
case $1 in
  doctor) exit $(cat doctor-$NODE);;
  train)
    echo $PPID > trainer.pid
    trap 'echo told >> calls; [[ -s hold ]] || exit 130' TERM
    touch live.toml
    until [[ -s train ]]; do sleep 0.02; done
    exit $(cat train);;
  slurm-node)
    until [[ -s node || -e live.toml ]]; do sleep 0.02; done
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
    assert sorted(job.calls()[2:]) == ["node1 train", "node2 serves", "node2 slurm-node"]
    assert not (tmp_path / "live.toml").exists()


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
    job = start()  # the exit codes are still there
    assert job.end()[0] == 130
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
        job.exits("train", 130)
    assert job.end()[0] == 130
    assert ("scancel --signal=TERM 7" in job.calls()) == (number is signal.SIGUSR1)
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
    assert "the job has 2 nodes, and this file is for 1" in done.stderr
