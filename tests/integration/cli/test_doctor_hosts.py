"""`penstock doctor --serve` and `--with`: two processes of one machine, as two hosts."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from penstock.config import RunConfig, load
from penstock.errors import ConfigError
from penstock.runtime.ports import free_ports
from penstock.runtime.security import Security
from services.cli.app import main
from services.doctor.finding import Finding, Status
from services.doctor.hosts import asking, ports
from services.doctor.hosts.comparison import compare
from services.doctor.hosts.facts import HostFacts, code_digest, installed_versions, model_digest
from services.doctor.hosts.ports import ANY, OpenPort, engine_ports, greeting, reach_all, server_ports
from services.recipe import Recipe
from tests.support.waiting import HANG_S

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "models" / "tiny-qwen3-vl"


def facts(**changes: Any) -> HostFacts:
    told = {
        "host": "b",
        "advertised": "b",
        "python": "3.11.2",
        "versions": {"penstock": "0.1.0", "torch": "2.11.0"},
        "code": "c0de",
        "model": "d1",
        "sees_marker": True,
        "reach_errors": {ANY: ""},
        "ports": {},
        "heard_at": 0.0,
        "said_at": 0.0,
    }
    return HostFacts(**told | changes)


def found(
    other: HostFacts,
    *,
    ahead_s: float = 0.0,
    run: RunConfig | None = None,
    reach_errors: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Finding]:
    run = run or RunConfig(folder=Path("/runs/x"))
    findings = compare(facts(), other, run=run, ahead_s=ahead_s, reach_errors=reach_errors)
    return {finding.name.removeprefix("b: "): finding for finding in findings}


@pytest.mark.parametrize(
    ("ahead_s", "status", "words"),
    [
        (0.3, "ok", "the same"),
        (-0.9, "ok", "the same"),
        (2.5, "warning", "2.5 s ahead of this host's"),
        (-90.0, "fault", "90.0 s behind this host's"),
    ],
)
def test_clocks(ahead_s: float, status: str, words: str) -> None:
    """A second makes timelines wrong, a minute may break certificates."""
    clock = found(facts(), ahead_s=ahead_s)["clock"]
    assert (clock.status, words in clock.seen, bool(clock.remedy)) == (Status(status), True, status != "ok")


def test_versions_that_differ_are_named() -> None:
    """Of packages that both have, and of Penstock's own files; another Python is a warning."""
    other = facts(versions={"penstock": "0.1.0", "torch": "2.10.0", "sglang": "0.5.23"}, python="3.12.1")
    versions = found(other)["versions"]
    assert (versions.status, versions.seen) == (Status.FAULT, "torch 2.10.0 there and 2.11.0 here")
    assert "Penstock's files" in found(facts(code="other"))["versions"].seen
    assert found(facts(python="3.12.1"))["versions"].status is Status.WARNING
    assert found(facts(versions={"penstock": "0.1.0"}, python="3.11.9"))["versions"].status is Status.OK


def test_builds_of_one_version_that_may_not_go_together_are_named() -> None:
    """Those for two versions of CUDA may have two of NCCL; a host without a GPU has a build of its own."""
    of_cpus = found(facts(versions={"penstock": "0.1.0", "torch": "2.11.0+cpu"}))["versions"]
    assert (of_cpus.status, of_cpus.seen) == (Status.OK, "penstock 0.1.0, torch 2.11.0+cpu there and 2.11.0 here")
    of_cuda = facts(versions={"penstock": "0.1.0", "torch": "2.11.0+cu130"})
    versions = found(of_cuda)["versions"]
    assert (versions.status, versions.seen) == (Status.WARNING, "torch 2.11.0+cu130 there and 2.11.0 here")
    assert "the same builds" in versions.remedy
    versions = found(of_cuda.model_copy(update={"python": "3.12.1"}))["versions"]
    assert versions.seen == "torch 2.11.0+cu130 there and 2.11.0 here, Python 3.12.1 there and 3.11.2 here"
    assert all(words in versions.remedy for words in ("the same builds", "the same Python"))


def test_models_that_differ_are_named() -> None:
    """A folder that one of them lacks, or that has other files; a model of the Hub is each host's own matter."""
    assert found(facts())["model"].status is Status.OK
    assert found(facts(model=""))["model"].seen == "the folder of model.path is here only"
    assert found(facts(model="d2"))["model"].status is Status.FAULT
    assert "model" not in {
        each.name.removeprefix("b: ")
        for each in compare(facts(model=""), facts(model=""), run=RunConfig(), ahead_s=0.0, reach_errors={})
    }


def test_a_folder_that_is_not_shared() -> None:
    """A fault where the run's folder is given, as in a Slurm job; else a warning, for runs can do without."""
    away = facts(sees_marker=False)
    assert found(away)["shared path"].status is Status.FAULT
    shared = found(away, run=RunConfig(dir=Path("/runs")))["shared path"]
    assert (shared.status, "/runs" in shared.seen) == (Status.WARNING, True)


def test_each_port_that_is_closed_is_named() -> None:
    """In both directions. If the other host reaches none here, that is the name's fault."""
    open_ports = {"router.port": "", "reward.port": ""}
    assert found(facts(), reach_errors=open_ports)["ports"].seen == "reached there: router.port, reward.port"
    closed = found(
        facts(reach_errors={"rollout.port": "timed out", ANY: ""}),
        reach_errors={"bus.url": "Connection refused", "router.port": "timed out", "reward.port": ""},
    )
    faults = {name: finding.seen for name, finding in closed.items() if finding.status is Status.FAULT}
    assert faults == {
        "rollout.port here": "rollout.port here was not reached from there: timed out",
        "bus.url there": "bus.url there was not reached from here: Connection refused",
        "router.port there": "router.port there was not reached from here: timed out",
    }
    assert closed["name and port"].status is Status.OK
    assert "ports" not in closed
    none = found(facts(reach_errors={"rollout.port": "timed out", ANY: "timed out"}))
    assert [name for name, finding in none.items() if finding.status is Status.FAULT] == ["name and port"]


def test_the_ports_of_a_host_are_those_that_its_processes_have() -> None:
    """Fixed ones of servers that the recipe does not place elsewhere; any port, unless all have a fixed one."""
    ports = ("--router.port=7001", "--reward.port=7002", "--bus.url=nats://127.0.0.1:4222")
    recipe = load(Recipe, [], [*ports, "--worker.port=7004", "--reward.http_port=7003"])
    assert engine_ports(recipe) == {ANY: 0}
    assert server_ports(recipe) == {"bus.url": 4222, "router.port": 7001, "reward.port": 7002, ANY: 0}
    elsewhere = ("--bus.url=nats://203.0.113.1:4222", "--worker.router_address=203.0.113.1:7001")
    recipe = load(Recipe, [], [*ports[:2], *elsewhere, "--rollout.port=7010", "--router.http_port=7080"])
    assert server_ports(recipe) == {"reward.port": 7002, "rollout.port": 7010, ANY: 0}
    fixed = ("--rollout.port=7010", "--trainer.weight_sync.transport=delta")
    assert engine_ports(load(Recipe, [], fixed)) == {"rollout.port": 7010}
    assert ANY in engine_ports(load(Recipe, [], [*fixed, "--rollout.prefill=1", "--rollout.decode=1"]))


def test_a_port_is_reached_where_the_right_host_answers() -> None:
    """Whatever listens there already is right; another program in place of the greeting is not."""
    with greeting("127.0.0.1", {"a": 0}, "a" * 32) as first:
        port = first["a"].port
        with greeting("127.0.0.1", {"b": port, ANY: 0}, "b" * 32) as second:
            assert (second["b"], second[ANY].greeting) == (OpenPort(port=port, greeting=""), "b" * 32)
            assert reach_all("127.0.0.1", {**first, **second}) == {"a": "", "b": "", ANY: ""}
        wrong = {"a": OpenPort(port=port, greeting="b" * 32), **second}
        errors = reach_all("127.0.0.1", wrong)
    assert errors == {"a": "another program answers there", "b": "", ANY: "Connection refused"}
    refused = pytest.raises(ConfigError, match=r"network\.host = '203\.0\.113\.1': cannot listen there")
    with refused, greeting("203.0.113.1", {ANY: 0}, "a" * 32):
        pass


def test_a_model_is_known_by_its_files(tmp_path: Path) -> None:
    """Names, sizes, and what JSON files say."""
    copy = tmp_path / "model"
    shutil.copytree(MODEL, copy)
    assert model_digest(copy) == model_digest(MODEL) != ""
    config = copy / "config.json"
    config.write_text(config.read_text().replace("{", "{ ", 1))
    assert model_digest(copy) != model_digest(MODEL)
    assert model_digest(tmp_path / "none") == ""


def test_what_a_host_says_of_itself() -> None:
    """Versions of what is installed, and one digest of one tree."""
    assert installed_versions().keys() >= {"penstock", "torch", "sglang", "transformers"}
    assert code_digest() == code_digest()


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[..., tuple[str, "subprocess.Popen[str]"]]]:
    """Start `penstock doctor --serve`; returns its address and the process."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **environment: str) -> tuple[str, "subprocess.Popen[str]"]:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "doctor", "--json", "--serve=0", *arguments],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stderr is not None
        line = process.stderr.readline()
        address = re.search(r"--with (\S+)`", line)
        assert address is not None, line + process.stderr.read()
        return address[1], process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    capsys.readouterr()
    code = main(["doctor", "--json", *arguments])
    return code, {each["name"].partition(": ")[2]: each for each in json.loads(capsys.readouterr().out)["checks"]}


def test_hosts_that_fit(
    tmp_path: Path, serving: Callable[..., tuple[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every check has a line; the one that answers ends when all have asked, and nothing is left in the folder."""
    settings = (f"--model.path={MODEL}", f"--run.folder={tmp_path}/run")
    address, process = serving("--peers=2", *settings)
    for _ in range(2):
        code, told = asked(capsys, f"--with={address}", *settings)
        assert code == 0, told
        assert {name: each["status"] for name, each in told.items()} == dict.fromkeys(
            ("clock", "versions", "shared path", "model", "name and port", "ports"), "ok"
        )
    out, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    assert json.loads(out)["checks"][0]["seen"] == "127.0.0.1, 127.0.0.1 asked"
    assert list((tmp_path / "run").iterdir()) == []


def test_fixed_ports_are_open_until_all_have_looked(
    tmp_path: Path,
    serving: Callable[..., tuple[str, Any]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other host listens on those of its servers; what keeps one from it is named with the setting."""
    router, reward, bus, rollout = free_ports(4)
    settings = (f"--run.folder={tmp_path}", f"--router.port={router}", f"--reward.port={reward}")
    settings += (f"--bus.url=nats://127.0.0.1:{bus}", f"--rollout.port={rollout}")
    address, process = serving("--peers=2", *settings)
    code, told = asked(capsys, f"--with={address}", "--network.host=127.0.0.2", *settings)
    assert code == 0, told
    assert told["ports"]["seen"] == "reached there: bus.url, router.port, reward.port, rollout.port, any free port"
    reach = ports.reach

    def reach_through_a_firewall(host: str, port: OpenPort) -> str:
        return "timed out" if port.port == reward else reach(host, port)

    monkeypatch.setattr(ports, "reach", reach_through_a_firewall)
    code, told = asked(capsys, f"--with={address}", "--network.host=127.0.0.2", *settings)
    faults = {name: each["seen"] for name, each in told.items() if each["status"] == "fault"}
    assert faults == {"reward.port there": "reward.port there was not reached from here: timed out"}
    assert code == 1
    process.communicate(timeout=HANG_S)
    assert process.returncode == 0


def test_hosts_that_do_not_fit(
    tmp_path: Path, serving: Callable[..., tuple[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Another folder of runs and another model under the same settings, and a name that leads elsewhere."""
    for host in ("a", "b"):
        (tmp_path / host).mkdir()
    shutil.copytree(MODEL, tmp_path / "a" / "model")
    address, process = serving(f"--model.path={tmp_path}/b/model", f"--run.folder={tmp_path}/b/run")
    code, told = asked(
        capsys,
        f"--with={address}",
        f"--model.path={tmp_path}/a/model",
        f"--run.folder={tmp_path}/a/run",
        "--network.advertise_host=no-such-host.invalid",
    )
    assert code == 1
    faults = {name: each["seen"] for name, each in told.items() if each["status"] == "fault"}
    assert faults.keys() == {"shared path", "model", "name and port"}
    assert "here only" in faults["model"]
    assert "not reached from there as no-such-host.invalid" in faults["name and port"]
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0  # it has answered until it was stopped
    assert "no-such-host.invalid asked" in out


def test_the_token_is_asked_for(
    tmp_path: Path,
    serving: Callable[..., tuple[str, Any]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host without it learns nothing, one with it everything."""
    address, _ = serving(f"--run.folder={tmp_path}", PENSTOCK_TOKEN="5b0e7c1d9a3f4862")
    code, told = asked(capsys, f"--with={address}", f"--run.folder={tmp_path}")
    assert code == 1
    assert told.keys() == {"access"}
    monkeypatch.setenv("PENSTOCK_TOKEN", "5b0e7c1d9a3f4862")
    assert asked(capsys, f"--with={address}", f"--run.folder={tmp_path}")[0] == 0


def test_a_host_that_does_not_answer(tmp_path: Path) -> None:
    """Named with its address, after a while."""
    (port,) = free_ports(1)
    recipe = Recipe(run=RunConfig(folder=tmp_path))
    (finding,) = asking.ask(f"127.0.0.1:{port}", recipe, Security(), patience_s=0.1)
    assert (finding.status, finding.name) == (Status.FAULT, f"127.0.0.1:{port}: name and port")
    assert "refused" in finding.seen
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--serve=0", "--with=a:1"), "the two sides of a comparison"),
        (("--peers=2", "--with=a:1"), "give --serve PORT"),
        (("--with=node2",), "write HOST:PORT"),
    ],
)
def test_contradictions_are_refused(arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is asked."""
    assert main(["doctor", *arguments]) == 2
    assert words in capsys.readouterr().err
