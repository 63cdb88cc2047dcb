"""What hosts of a Ray cluster are asked before anything starts there, without Ray."""

import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config import load
from penstock.errors import ConfigError, SetupError
from services.recipe import Recipe
from tests.support.launch.fake_ray import Remote, faking_ray

NODE = {"NodeID": "far", "NodeManagerAddress": "10.0.0.2", "Alive": True, "Resources": {}}
CHECK = """
import sys
from services.launch.on_ray.inputs_check import check

launchers = {"HF_HUB_CACHE": "/launchers", "HF_ENDPOINT": "http://launchers"}
reasons, _ = check('[model]\\npath = "owner/unfetched"', ["worker"], ".", launchers)
from huggingface_hub import constants

print(reasons, constants.HF_HUB_CACHE, constants.ENDPOINT)
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the cluster, which has one node; what a host is asked is answered here."""

    def remote(function: Any) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *given: Remote(function(*given))))

    with faking_ray(monkeypatch):
        module: Any = importlib.import_module("services.launch.on_ray.cluster")
        monkeypatch.setattr(module.inputs_check, "check", lambda *_: ({}, []))
        vars(module.ray).update(
            remote=remote,
            nodes=lambda: [NODE],
            get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "head"),
            util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1"),
            cloudpickle=SimpleNamespace(register_pickle_by_value=lambda module: None),
        )
        yield module


async def test_a_host_is_checked_with_the_launcher_s_variables(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those that its processes get; its PATH stays its own."""
    handed: list[Mapping[str, str]] = []

    def check(text: str, services: Sequence[str], folder: str, defaults: Mapping[str, str]) -> tuple[Any, Any]:
        handed.append(defaults)
        return {}, []

    monkeypatch.setenv("HF_TOKEN", "hf_launchers")
    monkeypatch.setattr(module.inputs_check, "check", check)
    cluster = module.Cluster(load(Recipe, [], []), tmp_path)
    await cluster.look()
    assert [host.unfit or host.unfit_for for host in cluster.hosts] == [{}]
    assert [(each["HF_TOKEN"], "PATH" in each) for each in handed] == [("hf_launchers", False)]


@pytest.mark.parametrize(
    ("error", "what", "remedy"),
    [
        (
            ConnectionError("Could not find any running Ray instance."),
            "there is no Ray cluster on this machine; ",
            "start one with `ray start --head`, join one with `ray start --address=HEAD:6379`, or submit the run with "
            "`ray job submit`",
        ),
        (
            RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    Python: 3.12.3"),
            "Version mismatch: The cluster was started with: Ray: 2.60.0 Python: 3.12.3; ",
            "this machine must be a node of the cluster (`ray start --address=HEAD:6379`) with the cluster's versions "
            "of Python and Ray, or submit the run with `ray job submit`",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_cluster_that_cannot_be_joined_is_explained(
    module: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, what: str, remedy: str
) -> None:
    """In one line, with what to do: by default the cluster is that of this machine, which may have none."""
    asked: list[str] = []

    def init(*, address: str, **_: Any) -> None:
        asked.append(address)
        raise error

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    vars(module.ray)["init"] = init
    said = re.escape(f"launch.ray_address = 'auto': {what}{remedy}")
    with (
        pytest.raises(SetupError, match=f"^{said}$"),
        module.connected(load(Recipe, [], []).launch),
    ):
        pytest.fail("it is not connected")
    assert asked == ["auto"]


@pytest.mark.parametrize(
    ("ahead_s", "expected"),
    [
        (0.9, ["host 10.0.0.2: 0 GPUs, 0 CPUs"]),
        (-3.0, ["host 10.0.0.2: 0 GPUs, 0 CPUs", "  its clock is 3 s behind the one here; have both hosts"]),
        (59.0, ["host 10.0.0.2: 0 GPUs, 0 CPUs", "  its clock is 59 s ahead of the one here; have both hosts"]),
        (120.0, ["host 10.0.0.2 is left out: its clock is 120 s ahead of the one here; have both hosts"]),
        (-120.0, ["host 10.0.0.2 is left out: its clock is 120 s behind the one here; have both hosts"]),
    ],
)
async def test_a_clock_that_is_wrong_is_named(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ahead_s: float, expected: list[str]
) -> None:
    """Up to a minute the run does with it, as `penstock doctor` says; above, certificates may not be valid there.

    Python takes 70 s to start on the host, which counts neither way.
    """
    now = [1e9]
    look = module.facts.look

    def start_and_look(mark: str) -> Mapping[str, Any]:
        now[0] += 70.0
        return look(mark)

    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: now[0], monotonic=time.monotonic))
    monkeypatch.setattr(module.facts, "time", SimpleNamespace(time=lambda: now[0] + ahead_s))
    monkeypatch.setattr(module.facts, "look", start_and_look)
    cluster = module.Cluster(load(Recipe, [], []), tmp_path)
    said: list[str] = []
    cluster.report = said.append
    await cluster.look()
    assert [line[: len(wanted)] for line, wanted in zip(said, expected, strict=True)] == expected


async def test_another_build_of_torch_is_named(module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Beside a clock that is wrong; the run does with both."""
    own = module.facts.look("")
    answers = iter(("2.9.1+cu128", "2.9.1+cu130"))
    monkeypatch.setattr(module.facts, "look", lambda _: {**own, "versions": {"torch": next(answers)}})
    monkeypatch.setattr(module, "ahead_s", lambda **_: 3.0)
    cluster = module.Cluster(load(Recipe, [], []), tmp_path)
    await cluster.look()
    [host] = cluster.hosts
    assert not host.unfit
    assert "torch 2.9.1+cu130 is there, 2.9.1+cu128 here; install the same builds" in host.remark
    assert "; its clock is 3 s ahead of the one here" in host.remark


async def test_gpus_of_a_host_that_is_left_out_are_not_forgotten(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run that may need them is refused; it does not start on CPUs instead."""
    monkeypatch.setattr(module.versions, "difference", lambda found, own: "its torch is old")
    monkeypatch.setattr(module.ray, "nodes", lambda: [NODE | {"Resources": {"GPU": 8.0, "CPU": 16.0}}])
    cluster = module.Cluster(load(Recipe, [], []), tmp_path)
    await cluster.look()
    assert [(host.unfit, host.num_gpus, host.num_cpus) for host in cluster.hosts] == [("its torch is old", 8, 16)]
    assert cluster.has_gpus


def test_a_dry_run_looks_for_the_run_folder_on_each_host(
    module: Any, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It refuses what the start would, GPUs only where the run folder is not, and names hosts without weight files.
    Nothing of it stays."""
    marked: list[Path] = []

    def remote(function: Any) -> Any:
        def options(*, scheduling_strategy: Any, **_: Any) -> Any:
            def call(*given: Any) -> Remote:
                answer = function(*given)
                if function is module.facts.look:
                    marked.append(Path(given[0]).parent)
                    answer["sees_run_folder"] &= scheduling_strategy.node_id in near
                return Remote(answer)

            return SimpleNamespace(remote=call)

        return SimpleNamespace(options=options)

    head = NODE | {"NodeID": "head", "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 8.0}}
    far = NODE | {"Resources": {"CPU": 8.0, "GPU": 8.0}}
    command: Any = importlib.import_module("services.cli.train.on_ray")
    monkeypatch.setattr(command, "connected", lambda config: nullcontext())
    monkeypatch.setattr(command.hub_models, "with_models", lambda recipe, fetch: recipe)
    monkeypatch.setattr(command.run_inputs, "require_at_launcher", lambda recipe: None)
    vars(module.ray).update(remote=remote, nodes=lambda: [head, far])
    before = sorted(recipe.run.dir.parent.iterdir())
    near = {"head", "far"}
    assert command.train(recipe, None, dry_run=True, view=False) == 0
    assert "does not see the run folder" not in capsys.readouterr().out
    near.remove("far")
    with pytest.raises(ConfigError, match=r"trainer\.ranks = 1 needs 1 GPUs of one host that has the run folder"):
        command.train(recipe, None, dry_run=True, view=False)
    assert "host 10.0.0.2: 8 GPUs, 8 CPUs\n  does not see the run folder: no trainer there" in capsys.readouterr().out
    head["Resources"] = far["Resources"]
    sync = recipe.trainer.weight_sync.model_copy(update={"transport": "disk"})
    by_disk = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"weight_sync": sync})})
    assert command.train(by_disk, None, dry_run=True, view=False) == 0
    assert "engines on 10.0.0.2 do not see the run folder, and get a broadcast" in capsys.readouterr().out
    assert {*marked} == {recipe.run.dir.parent}
    assert sorted(recipe.run.dir.parent.iterdir()) == before


def test_the_hub_is_looked_at_where_the_launcher_s_variables_say() -> None:
    """If the host does not say: huggingface_hub reads its variables once, when it is imported."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own["HF_ENDPOINT"] = "http://its"
    done = subprocess.run([sys.executable, "-c", CHECK], env=own, capture_output=True, text=True, check=False)
    assert done.stdout == "{} /launchers http://its\n", done.stderr
