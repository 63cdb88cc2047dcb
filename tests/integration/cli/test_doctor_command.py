"""`penstock doctor` on this machine: with what breaks, what hangs, and a Hub that refuses, is away or says nothing."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from penstock.config import load
from penstock.runtime.ports import free_ports
from services.cli.app import main
from services.doctor import examination, gpu
from services.doctor import hub as hub_check
from services.doctor.examination import Check, examine
from services.doctor.finding import Finding, Status, ok
from services.doctor.network import check_bus, check_ports, resolve
from services.launch.gpu_plan import find_gpus
from services.recipe import Recipe
from services.trainer.data.sources import hub as data_hub
from tests.support.doctor import assert_found
from tests.support.trainer.data.hub_server import COMMIT, HubServer, Repo, hub_server
from tests.support.waiting import HANG_S

REPOS = {
    "owner/plain": Repo(commits={COMMIT: {"train.jsonl": b'{"problem": "1+1", "answer": "2"}\n'}}),
    "owner/gated": Repo(commits={}, refusal="GatedRepo"),
    "owner/expired": Repo(commits={}, status=401, message="Invalid credentials in Authorization header"),
}


ROOT = Path(__file__).parents[3]
UNPRIVILEGED = [] if os.geteuid() else ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
"""Begins the command of a process to which the kernel refuses what it refuses to others; root's own goes through."""


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code and findings by their names."""
    capsys.readouterr()
    code = main(["doctor", "--json", *arguments])
    printed = capsys.readouterr()
    assert printed.err == ""
    found = json.loads(printed.out)
    assert found["status"] == max((each["status"] for each in found["checks"]), key=["ok", "warning", "fault"].index)
    return code, {each["name"]: each for each in found["checks"]}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(examination, "DEADLINE_S", 240.0)  # a machine that tests may be slow


def test_the_demo_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    """Each check has a line, and none a fault."""
    code, found = report(capsys, "tiny-cpu")
    assert code == 0
    assert found.keys() >= {
        "Python", "packages", "nats-server", "GPUs", "memory", "shared memory", "disk", "temporary files", "model",
        "data", "settings", "Hub", "ports", "hosts",
    }  # fmt: skip
    assert all(each["remedy"] for each in found.values() if each["status"] != "ok")


def test_without_a_recipe_the_machine_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing that only a recipe asks for."""
    code, found = report(capsys)
    assert code == 0
    assert {"Python", "GPUs", "disk"} <= found.keys()
    assert not {"model", "Hub", "ports"} & found.keys()


def test_supervised_training_is_looked_at_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """Without engines, NATS and ports; what `penstock sft` refuses is a fault."""
    code, found = report(capsys, "tiny-sft-cpu", "--sft")
    assert code == 0
    assert found.keys() >= {"Python", "packages", "memory", "disk", "model", "data", "settings", "Hub"}
    assert not found.keys() & {"nats-server", "SGLang", "ports", "hosts", "bus", "shared memory"}
    code, found = report(capsys, "tiny-sft-cpu", "--sft", "--data.max_prompt_tokens=10")
    assert (code, found["settings"]["status"]) == (1, "fault")
    assert main(["sft", "tiny-sft-cpu", "--data.max_prompt_tokens=10"]) == 2
    assert capsys.readouterr().err == f"error: {found['settings']['seen']}; {found['settings']['remedy']}\n"


def test_faults_make_it_fail(capsys: pytest.CaptureFixture[str]) -> None:
    """All are found at once, each with its remedy; so does a recipe that cannot be read, beside the machine's."""
    taken = socket.create_server(("127.0.0.1", 0))
    with taken:
        port = taken.getsockname()[1]
        overrides = ("--data.path=/no/such.parquet", f"--router.port={port}", "--rollout.tensor_parallel=4")
        code, found = report(capsys, "tiny-cpu", *overrides)
    assert code == 1
    assert {name for name, each in found.items() if each["status"] == "fault"} == {"data", "ports", "plan"}
    assert found["ports"]["remedy"] == "choose another port"
    assert f"router.port: cannot listen on 127.0.0.1:{port}" in found["ports"]["seen"]
    code, found = report(capsys, "tiny-cpu", "--trainer.num_stepz=1")
    assert (code, found["recipe"]["status"]) == (1, "fault")
    assert found["recipe"]["remedy"] == "did you mean trainer.num_steps?"
    code, spaced = report(capsys, "tiny-cpu", "--trainer.num_steps", "20")
    assert (code, spaced["recipe"]["seen"]) == (1, "argument '--trainer.num_steps' has no value")
    assert found["Python"]["status"] == "ok"


def test_people_read_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Status, name, what was seen; below it what to do; at the end how many."""
    assert main(["doctor", "tiny-cpu", "--sampling.top_p=0.5"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("fault")]
    assert lines[at].split(None, 2)[1:] == ["settings", "sampling.top_p = 0.5 cannot be trained on"]
    assert lines[at + 1].strip() == "-> set 1 (all of the distribution)"
    assert lines[-1].startswith("1 fault, ")


def test_nothing_heavy_is_imported() -> None:
    """Without a GPU: the answer comes in about a second."""
    program = (
        "import sys; from services.cli.app import main; code = main(['doctor', 'tiny-cpu', '--json'])\n"
        "assert not {'torch', 'sglang', 'transformers', 'pyarrow'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_gpu_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real torch is asked; on a machine without a GPU it has none of those that the environment names."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9")
    facts = gpu.probe_gpus(timeout_s=280)
    found = gpu.check_gpus(find_gpus(), facts)
    assert found.status is Status.FAULT
    assert f"torch {facts.torch}" in found.seen


def test_what_hangs_or_breaks_hides_nothing() -> None:
    """It is a warning of its own; the others are in their order."""
    goes_on = threading.Event()

    def hang() -> list[Finding]:
        goes_on.wait()
        return []

    def break_() -> list[Finding]:
        raise ZeroDivisionError("a mistake")

    checks = [
        Check(name="hangs", look=hang, deadline_s=0.01),
        Check(name="breaks", look=break_, deadline_s=240),
        Check(name="works", look=lambda: [ok("works", "well"), None], deadline_s=240),
    ]
    try:
        hung, broken, works = examine(checks)
    finally:
        goes_on.set()
    assert (hung.name, hung.status, hung.seen) == ("hangs", Status.WARNING, "no answer within 0.01 s")
    assert broken.status is Status.WARNING
    assert "ZeroDivisionError: a mistake" in broken.seen
    assert works == ok("works", "well")


def test_ports_and_the_bus() -> None:
    """Of the recipe: one that is taken, one that is free; a NATS server that is there, and one that is not."""
    (free,) = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert check_ports(load(Recipe, [], [f"--trainer.port={port}"])).status is Status.FAULT
        answering = check_bus([f"nats://127.0.0.1:{port}"], socket.create_connection)
        assert answering is not None
        assert answering.status is Status.OK
        one_away = check_bus([f"nats://127.0.0.1:{port}", f"nats://127.0.0.1:{free}"], socket.create_connection)
        assert one_away is not None
        assert (one_away.status, f"127.0.0.1:{free}' does not answer" in one_away.seen) == (Status.WARNING, True)
    assert check_ports(load(Recipe, [], [f"--trainer.port={free}"])).status is Status.OK
    silent = check_bus([f"nats://127.0.0.1:{free}"], socket.create_connection)
    assert silent is not None
    assert (silent.status, "penstock serve nats" in silent.remedy) == (Status.FAULT, True)
    assert check_bus([], socket.create_connection) is None
    assert resolve("127.0.0.1") == ["127.0.0.1"]
    with pytest.raises(socket.gaierror):
        resolve("no-such-host.invalid")


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ((), Status.FAULT),
        (("--worker.router_address=a:1",), Status.WARNING),
        (("--worker.router_address=a:1", "--worker.reward_address=b:1"), Status.WARNING),
        (("--worker.router_address=a:1", "--worker.reward_address=a:2"), Status.FAULT),
        (("--launch.backend=ray",), Status.FAULT),
        (("--slurm.gpus_per_node=8",), Status.FAULT),
    ],
)
def test_one_port_is_for_two_services_on_different_hosts(settings: tuple[str, ...], status: Status) -> None:
    """As the addresses say. Ray and Slurm have both of these on one host, the launcher's."""
    (free,) = free_ports(1)
    found = check_ports(load(Recipe, [], [f"--router.port={free}", f"--reward.port={free}", *settings]))
    assert_found(found, status, f"router.port = {free} is reward.port too", "give another")


@pytest.mark.parametrize("settings", ["--launch.backend=ray", "--slurm.gpus_per_node=8"])
def test_engines_of_a_divided_run_may_have_the_port_of_a_service(settings: str) -> None:
    """They may be on other hosts; where they are not, the launcher says so."""
    (free,) = free_ports(1)
    found = check_ports(load(Recipe, [], [f"--router.port={free}", f"--rollout.port={free}", settings]))
    assert_found(found, Status.WARNING, "router.port", "if both run on one host")


def test_a_run_folder_behind_a_closed_one(tmp_path: Path) -> None:
    """The closed folder is the fault, and the folder of temporary files has its line."""
    closed = tmp_path / "closed"
    (closed / "runs").mkdir(parents=True)
    closed.chmod(0)
    look = (
        "import sys; from penstock.config import load; from services.recipe import Recipe\n"
        "from services.doctor.examination import checks_of, examine\n"
        "[check] = [each for each in checks_of(load(Recipe, [], sys.argv[1:])) if each.name == 'memory']\n"
        "for found in examine([check]): print(found.status, found.name, found.seen, sep=': ')\n"
    )
    command = [*UNPRIVILEGED, sys.executable, "-c", look, f"--run.dir={closed}/runs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    closed.chmod(0o700)
    lines = done.stdout.splitlines()
    assert f"fault: disk: {closed} cannot be written to" in lines, done
    assert [line for line in lines if line.split(": ")[1] == "temporary files"], done


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub on this machine, and an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(hub_check, "TIMEOUT_S", HANG_S)
    with hub_server(REPOS) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def checked(path: str, **settings: Any) -> Finding:
    overrides = [f"--data.{name}={value}" for name, value in ({"path": path} | settings).items()]
    return hub_check.check_hub(load(Recipe, [], overrides))


def test_the_hub_is_asked_for_each_data_set(hub: HubServer) -> None:
    """Those of evaluation too; nothing is downloaded."""
    overrides = ["--data.path=owner/plain@[:10]", "--evaluation.sets.test.path=owner/gated"]
    found = hub_check.check_hub(load(Recipe, [], overrides))
    assert found.status is Status.FAULT
    assert "'owner/gated' on the Hugging Face Hub is gated" in found.seen
    assert "hf auth login" in found.remedy
    assert checked("owner/plain").seen == "owner/plain can be read"
    assert "no revision 'v9'" in checked("owner/plain", revision="v9").seen
    assert "neither a file or folder here nor a data set" in checked("owner/nothing").seen
    expired = checked("owner/expired")
    assert (expired.status, "did not accept HF_TOKEN" in expired.seen) == (Status.FAULT, True)
    assert "hf auth login" in expired.remedy
    assert hub_check.check_hub(load(Recipe, [], [])).seen == "not needed"
    assert not [path for path in hub.requests if "/resolve/" in path]


def test_a_hub_that_is_away(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault where the data set was never fetched, a warning where the cache has it."""
    data_hub.fetch("owner/plain", config="", split="", revision="")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        never, before = checked("owner/gated"), checked("owner/plain")
    assert (never.status, before.status) == (Status.FAULT, Status.WARNING)
    assert "`hf download owner/gated --repo-type dataset`" in never.remedy
    assert "HF_HUB_OFFLINE=1" in before.remedy


def test_a_hub_that_says_nothing(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the connection and never answers: the check gives up, and says so."""
    monkeypatch.setattr(hub_check, "TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{mute.getsockname()[1]}")
        found = checked("owner/plain")
    assert found.status is Status.FAULT
    assert "could not be fetched" in found.seen
