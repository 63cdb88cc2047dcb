"""What `penstock slurm` writes and refuses; what its sbatch file does: test_slurm_job.py."""

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest

from penstock.config import load
from penstock.errors import ConfigError, SetupError
from penstock.runtime.files import write_atomically
from services.cli import main
from services.launch.slurm import submission
from services.launch.slurm.node import addresses_of_first, plan_node
from services.launch.slurm.placement import NodeShare, place
from services.launch.slurm.script import job_script
from services.recipe import Recipe
from tests.unit.cli.test_cli import assert_mistake, penstock

FULL_NODES = ("--slurm.gpus_per_node=8", "--rollout.replicas=8", "--trainer.ranks=8")
"""The example of docs/operation/slurm.md: all engines are on the second node, the trainer is on the first."""


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


@pytest.mark.parametrize("time", ["0", "0:00", "0-00:00:00"])
def test_a_time_limit_of_zero_is_none(time: str) -> None:
    """By Slurm's manual; so it is not over before the run could end in order."""
    assert recipe(f"--slurm.time={time}").slurm.time == time


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


def test_a_run_in_a_given_folder_is_repeated_in_another(tmp_path: Path) -> None:
    """From its recipe.toml; the folder of a run that has begun is refused, with what continues that run."""
    mine = tmp_path / "mine"
    command = ("slurm", "--nodes=2", "--dry-run", f"--run.dir={tmp_path}/runs")
    assert penstock(*command, "tiny-cpu", f"--run.folder={mine}").returncode == 0
    assert f"\nrun={mine}\n" in (mine / "job.sh").read_text()
    assert penstock(*command, mine / "recipe.toml").returncode == 0
    assert len([*(tmp_path / "runs").iterdir()]) == 1
    (mine / "config.toml").write_text("")
    assert_mistake(
        penstock(*command, "tiny-cpu", f"--run.folder={mine}"),
        f"run.folder = '{mine}' holds a run already; `sbatch {mine}/job.sh` continues it",
        "shares=()",
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--slurm.partitoin=x",), ("slurm.partitoin", "did you mean slurm.partition?")),
        (("--slurm.time=tomorrow",), ("slurm.time = 'tomorrow'",)),
        (('--slurm.options=["constraint=h100"]',), ("'constraint=h100' is not an option of sbatch",)),
        (('--slurm.options=["--nodes=4"]',), ("give the number of nodes as `penstock slurm --nodes`",)),
        (('--slurm.options=["-N4"]',), ("'-N4': give the number of nodes as `penstock slurm --nodes`",)),
        (('--slurm.options=["--signal=USR1"]',), ("is set by `penstock slurm` itself",)),
        (("--slurm.time=5",), ("time = '5' is over before signal_s = 300", "lower signal_s")),
        (("--slurm.time=0-0:4",), ("is over before signal_s",)),
        (("--rollout.port=7010", "--rollout.replicas=3"), ("rollout.port = 7010 cannot be had by the 2 engines",)),
        (("--rollout.replicas=1", "--rollout.tensor_parallel=2"), ("rollout.tensor_parallel = 2: no GPU can be used",)),
        (('--slurm.container_mounts=["/a"]',), ("no effect without container_image",)),
        (("--trainer.device=cuda",), ("trainer.device = 'cuda', and slurm.gpus_per_node = 0",)),
        (("--rollout.replicas=20", "--slurm.gpus_per_node=8"), ("20 engines", "room for 15")),
        (("--launch.backend=ray",), ("launch.backend = 'ray'", "leave it out")),
        (("--data.profile=mth",), ("data.profile = 'mth' is unknown", "did you mean 'math'?")),
        (("--metrics.port=9400",), ("metrics.port = 9400",)),
        ((*FULL_NODES, "--trainer.dtype=float32"), ("engines hold bfloat16", "the trainer pushes float32")),
        (
            ("--slurm.gpus_per_node=8", "--rollout.replicas=1", "--trainer.device=cpu"),
            ("engines hold bfloat16", "the trainer pushes float32"),
        ),
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


def test_a_wrong_row_is_named_before_anything_is_submitted(tmp_path: Path) -> None:
    """As by `penstock train`: no job waits in the queue for it, and no run folder is left."""
    file, runs = tmp_path / "rows.jsonl", tmp_path / "runs"
    rows = [{"problem": "1 + 1?", "answer": "2"}, {"problem": "1 + 2?", "answer": ""}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = (f"--data.path={file}", f"--data.cache_dir={tmp_path}/cache", f"--run.dir={runs}")
    assert_mistake(penstock("slurm", "tiny-cpu", "--dry-run", *given), f"{str(file)!r}, row 1:", "repair the row")
    assert not runs.exists()


def test_what_would_be_downloaded_is_not_checked(tmp_path: Path) -> None:
    """It is said beside the job; the nodes fetch it."""
    inputs = ("--model.path=owner/unfetched-model", "--data.path=owner/unfetched-rows")
    shown = penstock("slurm", "tiny-cpu", "--dry-run", f"--run.dir={tmp_path}", *inputs)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "model.path owner/unfetched-model would be fetched from the Hugging Face Hub; it was not checked\n" in (
        shown.stdout
    )
    assert "data set owner/unfetched-rows would be fetched from the Hugging Face Hub; no rows were checked\n" in (
        shown.stdout
    )


@pytest.mark.parametrize("is_new", [True, False])
def test_a_full_disk_leaves_no_new_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_new: bool
) -> None:
    """One line says what to do; a new run folder goes, an earlier job in a given one stays."""
    folder = tmp_path / "mine"
    if not is_new:
        folder.mkdir()
        (folder / "job.sh").write_text("earlier")

    def write(file: Path, content: str) -> None:
        if file.name == "job.sh":
            raise OSError(errno.EDQUOT, "Disk quota exceeded", str(file))
        write_atomically(file, content)

    monkeypatch.setattr("services.cli.slurm.command.write_atomically", write)
    assert main(["slurm", "tiny-cpu", "--dry-run", f"--run.folder={folder}"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {folder}: [Errno {errno.EDQUOT}] Disk quota exceeded")
    assert error.endswith("are free there; make room and give the command again")
    assert [*folder.glob("job.sh")] == ([] if is_new else [folder / "job.sh"])
    assert folder.exists() is not is_new


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


def test_a_node_goes_on_with_the_settings_of_a_run_that_has_begun(tmp_path: Path) -> None:
    """As the trainer does; what was changed in the recipe has no effect."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.toml").write_text("[run]\nname = 'changed!'\n")
    (run / "config.toml").write_text("[run]\nname = 'begun!'\n")
    assert_mistake(penstock("slurm-node", run), "run.name = 'begun!'")


def test_a_node_without_the_run_folder_says_so(tmp_path: Path) -> None:
    """Its path is not shared."""
    assert_mistake(penstock("slurm-node", tmp_path / "run"), f"recipe {tmp_path}/run/recipe.toml cannot be read")
