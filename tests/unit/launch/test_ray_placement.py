"""Hosts, placement and addresses of a run on Ray, without Ray."""

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.config import load
from penstock.errors import ConfigError
from services.cli.app import main
from services.launch.on_ray import actor, facts, versions
from services.launch.on_ray.actor import Order, environment_of
from services.launch.on_ray.addresses import listening, require_launchable, with_peers
from services.launch.on_ray.placement import (
    Host,
    allowed,
    bundle,
    describe_hosts,
    describe_weight_files,
    label_selector,
    num_gpus_of,
    require_room,
    require_room_to_join,
)
from services.launch.on_ray.working_folder import working_folder
from services.launch.run_plan import plan_processes
from services.recipe import Recipe


def recipe(*overrides: str) -> Recipe:
    """The defaults with overrides."""
    return load(Recipe, [], overrides)


def host(name: str, num_gpus: int, **about: Any) -> Host:
    """A host that sees the run folder and has CPUs for everything, unless said otherwise."""
    usual: dict[str, Any] = {"node_id": name, "address": name, "num_cpus": 64, "sees_run_folder": True}
    return Host(**usual | about, num_gpus=num_gpus)


def room(hosts: list[Host], *overrides: str) -> list[str]:
    """The order in which the processes of a run with these settings fit."""
    settings = recipe(*overrides)
    processes = plan_processes(settings, own_bus=True)
    has_gpus = any(each.num_gpus for each in hosts)
    return [process.name for process in require_room(hosts, processes, settings, has_gpus=has_gpus)]


def test_each_process_needs_gpus_of_one_host() -> None:
    """Engines as many as they shard over, the trainer one for each rank, the others none; on CPUs nobody."""
    settings = recipe("--rollout.tensor_parallel=4", "--trainer.ranks=2")
    needed = {name: num_gpus_of(name, settings, has_gpus=True) for name in ("rollout", "trainer", "worker", "nats")}
    assert needed == {"rollout": 4, "trainer": 2, "worker": 0, "nats": 0}
    assert num_gpus_of("trainer", recipe("--trainer.device=cpu"), has_gpus=True) == 0
    assert num_gpus_of("rollout", settings, has_gpus=False) == 0
    assert bundle(4) == {"CPU": 1.0, "GPU": 4.0}
    assert bundle(0) == {"CPU": 1.0}


def test_the_order_leaves_the_fewest_splinters() -> None:
    """Large processes are placed first; among equal ones, and where it has the least choice, the trainer."""
    both = [host("a", 4), host("b", 4)]
    settings = ("--rollout.replicas=2", "--rollout.tensor_parallel=2")
    assert room(both, *settings) == ["rollout-0", "rollout-1", "trainer", "worker-0"]
    assert room(both, "--rollout.replicas=2") == ["trainer", "rollout-0", "rollout-1", "worker-0"]
    far = host("b", 4, sees_run_folder=False)
    order = room([host("a", 2), far], "--rollout.replicas=2", "--rollout.tensor_parallel=2")
    assert order == ["trainer", "rollout-0", "rollout-1", "worker-0"]


def test_there_is_room_or_it_is_said_what_is_missing() -> None:
    """GPUs count by host: an engine does not span two."""
    room([host("a", 2), host("b", 2)], "--rollout.replicas=3")
    with pytest.raises(ConfigError, match="no room for rollout-3; GPUs by host: a 2, b 2; lower the number of engines"):
        room([host("a", 2), host("b", 2)], "--rollout.replicas=4")
    room([host("a", 4), host("b", 5)], "--rollout.replicas=2", "--rollout.tensor_parallel=4")
    with pytest.raises(ConfigError, match="no room for rollout-1"):
        room([host("a", 3), host("b", 6)], "--rollout.replicas=2", "--rollout.tensor_parallel=4")
    with pytest.raises(ConfigError, match=r"trainer\.ranks = 3 needs 3 GPUs of one host that has the run folder"):
        room([host("a", 2), host("b", 2)], "--rollout.replicas=1", "--trainer.ranks=3")


def test_too_few_gpus_are_named_where_cpus_lack_too() -> None:
    """The trainer would have a GPU of the head, whose CPUs Ray does not count; the ninth engine would have none."""
    head, far = host("head", 8, num_cpus=0, is_launchers=True), host("far", 1, sees_run_folder=False)
    with pytest.raises(ConfigError, match="do not fit: no room for rollout-8; GPUs by host: head 8, far 1; lower the"):
        room([head, far], "--rollout.replicas=9")


def test_each_process_takes_a_cpu() -> None:
    """Ray places none on a host that was started with --num-cpus=0, or that has given all of its CPUs away."""
    room([host("a", 0, num_cpus=4)], "--rollout.replicas=2")
    with pytest.raises(
        ConfigError,
        match=r"no room for worker-0: .* take 1 CPU of Ray's count, 4 in all; CPUs by host: a 3; .*--num-cpus",
    ):
        room([host("a", 0, num_cpus=3)], "--rollout.replicas=2")
    with pytest.raises(ConfigError, match=r"no room for rollout-1: .*; CPUs by host: a 1, b 64; start Ray on a host"):
        room([host("a", 2, num_cpus=1), host("b", 1)], "--rollout.replicas=2")
    head, far = host("head", 0, num_cpus=0, is_launchers=True), host("far", 0, sees_run_folder=False)
    with pytest.raises(
        ConfigError,
        match=r"no room for trainer: .*CPUs by host: head 0, far 64; .*\(head\): start Ray there .* set run\.dir",
    ):
        room([head, far])
    room([head, host("near", 0)])
    choosy = host("a", 0, num_cpus=2, unfit_for={"worker": "no Pillow"})
    assert room([choosy, host("b", 0, num_cpus=1)], "--rollout.replicas=1") == ["worker-0", "trainer", "rollout-0"]


@pytest.mark.parametrize("hosts", [[host("a", 2)], [host("a", 0)]], ids=["fewer-gpus", "no-gpu"])
def test_workers_join_although_engines_of_a_dead_host_have_no_room(hosts: list[Host]) -> None:
    """They need no GPU, only a host that can run them. Engines join only where all fit, and may leave anywhere."""
    settings = recipe("--rollout.replicas=3", "--worker.num=2")
    processes = plan_processes(settings, own_bus=True)
    added = {process.name: process for process in processes}
    require_room_to_join(hosts, [added["worker-1"]], processes, settings, has_gpus=True)
    require_room_to_join(hosts, [], processes, settings, has_gpus=True)
    with pytest.raises(ConfigError, match=r"do not fit: no room for|trainer\.ranks = 1 needs 1 GPUs"):
        require_room_to_join(hosts, [added["worker-1"], added["rollout-2"]], processes, settings, has_gpus=True)
    workless = [dataclasses.replace(each, unfit_for={"worker": "no Pillow"}) for each in hosts]
    with pytest.raises(ConfigError, match="no host can run worker-1: no Pillow"):
        require_room_to_join(workless, [added["worker-1"]], processes, settings, has_gpus=True)


@pytest.mark.parametrize("num_gpus", [8, 0])
def test_an_engine_joins_only_beside_all_others(num_gpus: int) -> None:
    """On CPUs too: trainer, worker and three engines take 5 of Ray's count."""
    settings = recipe("--rollout.replicas=3")
    processes = plan_processes(settings, own_bus=True)
    added = [process for process in processes if process.name == "rollout-2"]
    has_gpus = num_gpus > 0
    require_room_to_join([host("a", num_gpus, num_cpus=5)], added, processes, settings, has_gpus=has_gpus)
    with pytest.raises(ConfigError, match=r"no room for .* take 1 CPU of Ray's count, 5 in all; CPUs by host: a 4"):
        require_room_to_join([host("a", num_gpus, num_cpus=4)], added, processes, settings, has_gpus=has_gpus)


def test_a_cluster_without_gpus_computes_on_cpus() -> None:
    """As many engines as wanted, but none over several GPUs, and no trainer that must have one."""
    room([host("a", 0)], "--rollout.replicas=9")
    with pytest.raises(ConfigError, match=r"trainer\.device = 'cuda', and the cluster has no GPU"):
        room([host("a", 0)], "--trainer.device=cuda")
    room([host("a", 2)], "--trainer.device=cuda")
    with pytest.raises(ConfigError, match="tensor_parallel = 2, and the cluster has no GPU"):
        room([host("a", 0)], "--rollout.tensor_parallel=2")


def test_a_precision_that_engines_do_not_take_is_refused() -> None:
    """Before anything is placed; whether there are GPUs decides what the default is."""
    room([host("a", 0)], "--trainer.dtype=float32")
    with pytest.raises(ConfigError, match=r"engines hold bfloat16, and with trainer\.dtype = 'float32'"):
        room([host("a", 0), host("b", 8)], "--trainer.dtype=float32")


def test_the_trainer_goes_where_the_run_folder_is() -> None:
    """The launcher's host has it in any case; if that has too few GPUs, the folder must be shared."""
    head = host("head", 0, is_launchers=True, sees_run_folder=False)
    far = host("far", 8, sees_run_folder=False)
    assert allowed([head, far], "trainer") == [head]
    assert allowed([head, far], "rollout") == [head, far]
    with pytest.raises(ConfigError, match=r"hosts with it: head; GPUs by host: head 0, far 8; set run\.dir to a"):
        room([head, far], "--rollout.replicas=1")
    room([head, host("near", 8)], "--rollout.replicas=1")
    assert list(describe_hosts([head, far])) == [
        "host head (this one): 0 GPUs, 64 CPUs",
        "host far: 8 GPUs, 64 CPUs",
        "  does not see the run folder: no trainer there",
    ]


def test_engines_that_cannot_read_weight_files_are_named() -> None:
    """They get a broadcast. Engines are on none of the hosts without a GPU, and `files_dir` is its owner's matter."""
    far = host("far", 8, sees_run_folder=False)
    hosts = [host("head", 8, is_launchers=True), host("near", 8), far, host("bare", 0, sees_run_folder=False)]
    unfit = host("unfit", 8, sees_run_folder=False, unfit_for={"rollout": "no model"})

    def said(hosts: list[Host], *overrides: str) -> list[str]:
        return list(describe_weight_files(hosts, recipe(*overrides), has_gpus=True))

    disk = "--trainer.weight_sync.transport=disk"
    assert [line.partition(";")[0] for line in said([*hosts, unfit], disk)] == [
        "trainer.weight_sync.transport = 'disk': engines on far do not see the run folder, and get a broadcast instead "
        "of weight files"
    ]
    idle = host("idle", 8, num_cpus=0, sees_run_folder=False)  # a head node of a cluster that runs nothing there
    assert said([*hosts[:2], hosts[3], idle], disk) == said(hosts) == []
    assert said(hosts, disk, "--trainer.weight_sync.files_dir=/shared") == []


def test_unfit_hosts_are_left_out_and_named() -> None:
    """A run that fits on the others starts; one that does not is refused with the reasons."""
    old = host("old", 8, unfit="penstock 0.0.1 is there, 0.1.0 here; install the same version")
    bare = host("bare", 0, num_cpus=1, unfit_for={"rollout": "model.path = '/m': no such folder"})
    room([host("a", 2), old], "--rollout.replicas=1")
    with pytest.raises(
        ConfigError, match=r"no room for rollout-1; GPUs by host: a 2, old 0; .* old is left out: penstock"
    ):
        room([host("a", 2), old], "--rollout.replicas=2")
    with pytest.raises(ConfigError, match=r"no host can run rollout-0: model\.path = '/m': no such folder"):
        room([bare], "--rollout.replicas=1")
    assert list(describe_hosts([host("b", 1), old, bare, host("h", 2, is_launchers=True)])) == [
        "host h (this one): 2 GPUs, 64 CPUs",
        "host b: 1 GPU, 64 CPUs",
        "host bare: 0 GPUs, 1 CPU",
        "  no rollout there: model.path = '/m': no such folder",
        "host old is left out: penstock 0.0.1 is there, 0.1.0 here; install the same version",
    ]


def test_bundles_are_restricted_by_ray_s_label_of_nodes() -> None:
    """One node, or one of several."""
    assert label_selector(["f0"]) == {"ray.io/node-id": "f0"}
    assert label_selector(["f1", "f0"]) == {"ray.io/node-id": "in(f0,f1)"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "^$"),
        ({"python": "3.11.2"}, "Python 3.11.2 is there, 3.11.7 here"),
        ({"penstock": ""}, "penstock is not installed there; install penstock 1.0 as here"),
        ({"penstock": "2.0"}, "penstock 2.0 is there, 1.0 here"),
        ({"code": "beef"}, r"has other code \(beef\) than the one here \(cafe\)"),
        ({"versions": {"torch": "2.9.1", "sglang": "0.5.1"}}, "^sglang 0.5.1 is there, 0.5.2 here; install the same"),
        ({"versions": {"torch": "2.8.0"}}, r"^torch 2.8.0 is there, 2.9.1\+cpu here"),
        ({"versions": {"torch": "2.9.1", "transformers": "5.0"}}, "^$"),
        ({"versions": {"torch": "2.9.1+cu130"}}, "^$"),
        ({"versions": {"torch": "2.9.1", "sglang": "0.5.2+cpu"}}, "^$"),
        ({"versions": {"torch": "2.9.2+cpu"}}, r"^torch 2.9.2\+cpu is there, 2.9.1\+cpu here"),
    ],
)
def test_hosts_that_differ_say_in_what(change: dict[str, Any], words: str) -> None:
    """Python and Penstock to the last digit, the code of a checkout, and packages that both have, of any build."""
    own: facts.Facts = {"python": "3.11.7", "penstock": "1.0", "code": "cafe"}
    own["versions"] = {"torch": "2.9.1+cpu", "sglang": "0.5.2"}
    assert re.search(words, versions.difference({**own, **change}, own))


@pytest.mark.parametrize(
    ("there", "here", "words"),
    [
        ("2.9.1+cu130", "2.9.1+cu130", ""),
        ("2.9.1+cu130", "2.9.1+cpu", ""),
        ("2.9.1+cpu", "2.9.1", ""),
        ("2.9.1+cu130", "2.9.1+cu128", "torch 2.9.1+cu130 is there, 2.9.1+cu128 here; install the same builds"),
        ("2.9.1+cu130", "2.9.1", "torch 2.9.1+cu130 is there, 2.9.1 here; install the same builds"),
    ],
)
def test_builds_that_may_not_go_together_are_named(there: str, here: str, words: str) -> None:
    """Those for two versions of CUDA may have two of NCCL; a host or launcher without a GPU has a build of its own."""
    said = versions.describe_builds({"versions": {"torch": there}}, {"versions": {"torch": here, "sglang": "0.5.2"}})
    assert (said[: len(words)], bool(said)) == (words, bool(words))


def test_a_host_says_which_code_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest changes with a module's content; the run folder is seen by the launcher's mark in it."""
    mark = tmp_path / "mark"
    assert not facts.look(str(mark))["sees_run_folder"]
    mark.touch()
    found = facts.look(str(mark))
    assert found["sees_run_folder"]
    assert found["code"] == facts.code_digest() != ""
    assert found["versions"]["transformers"] == importlib.metadata.version("transformers")
    (tmp_path / "penstock").mkdir()
    (tmp_path / "penstock/__init__.py").write_text("x = 1\n")
    digests = set()
    for text in ("x = 1\n", "x = 2\n"):
        (tmp_path / "penstock/__init__.py").write_text(text)
        monkeypatch.setattr(facts, "_PACKAGES", ("penstock",))
        monkeypatch.setattr(importlib.util, "find_spec", _found_in(tmp_path))
        digests.add(facts.code_digest())
    assert len(digests) == 2


def _found_in(folder: Path) -> Any:
    return lambda name: type("Spec", (), {"submodule_search_locations": [str(folder / name)]})()


def test_processes_elsewhere_know_the_launcher_s_address() -> None:
    """Servers leave 127.0.0.1, and workers are told where router and reward service are."""
    live = with_peers(listening(recipe("--router.port=7001", "--reward.port=7002"), "10.0.0.5"), "10.0.0.5")
    assert live.network.host == "10.0.0.5"
    assert (live.worker.router_address, live.worker.reward_address) == ("10.0.0.5:7001", "10.0.0.5:7002")
    own = with_peers(listening(recipe("--network.host=0.0.0.0", "--worker.reward_address=r:1"), "10.0.0.5"), "10.0.0.5")
    assert (own.network.host, own.worker.reward_address) == ("0.0.0.0", "r:1")


def test_agents_elsewhere_know_the_url_of_the_launcher_s_router() -> None:
    """With https where servers have certificates; a URL of the recipe's own stays."""
    agents = ("--worker.agents.mine.function=m:f", "--router.http_port=7003")
    secured = ("--security.tls_cert=c.pem", "--security.tls_key=k.pem")
    for settings, url in (
        (agents, "http://10.0.0.5:7003"),
        ((*agents, *secured), "https://10.0.0.5:7003"),
        ((*agents, "--worker.router_url=http://r:1"), "http://r:1"),
        (("--router.http_port=7003",), ""),
    ):
        assert with_peers(recipe(*settings), "10.0.0.5").worker.router_url == url


def test_relative_paths_are_those_of_the_launcher_where_a_host_has_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere they are those of the host's own process: for a submitted job, the folder that Ray unpacked."""
    (tmp_path / "launcher").mkdir()
    monkeypatch.chdir(tmp_path)
    assert working_folder(str(tmp_path / "launcher")) == str(tmp_path / "launcher")
    assert working_folder(str(tmp_path / "nowhere")) == str(tmp_path)


def test_settings_that_cannot_hold_on_several_hosts_are_refused() -> None:
    """A run folder that Ray removes with the job's, and one advertised address for all."""
    job = Path("/tmp/ray/session/runtime_resources/working_dir_files/_ray_pkg_1")
    require_launchable(recipe(), Path("/home/me"))
    require_launchable(recipe("--run.dir=/shared/runs"), job)
    with pytest.raises(ConfigError, match=r"run\.dir = 'runs' is inside the folder of a submitted job"):
        require_launchable(recipe(), job)
    require_launchable(recipe(), job, resumed=Path("/shared/runs/mine"))
    with pytest.raises(ConfigError, match=r"--resume = 'runs/mine' is inside the folder of a submitted job"):
        require_launchable(recipe(), job, resumed=Path("runs/mine"))
    with pytest.raises(ConfigError, match=r"network\.advertise_host = 'n1' would be told by the processes of all"):
        require_launchable(recipe("--network.advertise_host=n1"), Path("/home/me"))


def order(**about: Any) -> Order:
    """An order for a process without settings of its own."""
    plain: dict[str, Any] = {"name": "rollout-0", "command": [], "replaced": {}, "environment": {}, "defaults": {}}
    plain |= {"port": 0, "port_key": "", "takes_host": True, "advertises_only": False, "recipe_text": "", "folder": "/"}
    return Order(**plain | about)


def test_a_process_has_its_host_s_environment_with_the_launcher_s_tokens() -> None:
    """Tokens are the launcher's; of other variables a host's own win; GPUs are those that Ray gave."""
    wanted = order(environment={"PENSTOCK_TOKEN": "t"}, defaults={"HF_HOME": "/mine", "NCCL_DEBUG": "INFO"})
    own = {"PATH": "/bin", "PENSTOCK_TOKEN": "old", "HF_HOME": "/its"}
    found = environment_of(wanted, own, gpus=["2", "3"])
    assert found["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert (found["PENSTOCK_TOKEN"], found["HF_HOME"], found["NCCL_DEBUG"]) == ("t", "/its", "INFO")
    assert environment_of(wanted, own, gpus=[])["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("gpus", [["0"], []])
@pytest.mark.parametrize(
    ("own", "launchers", "expected"),
    [("1", "8", "8"), ("4", "8", "4"), ("4", "", "4"), ("1", "", None), ("", "8", "8"), ("", "", None)],
)
def test_threads_are_the_host_s_or_the_launcher_s_not_ray_s(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], own: str, launchers: str, expected: str | None
) -> None:
    """Ray gives its actors one thread where the host sets no number; one is also what processes on CPUs get."""
    monkeypatch.setattr(actor, "find_gpus", lambda _: gpus)
    name = "OMP_NUM_THREADS"
    wanted = order(defaults={name: launchers} if launchers else {})
    found = environment_of(wanted, {name: own} if own else {}, gpus=gpus)
    assert found.get(name) == (expected if gpus or expected else "1")


def test_a_missing_ray_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is read or written."""
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("services.cli.train.on_ray", "services.launch.on_ray.cluster", "services.launch.on_ray.launch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    code = main(["train", "tiny-cpu", "--launch.backend=ray", f"--run.dir={tmp_path}/runs"])
    assert code == 2
    assert "`penstock train --launch.backend=ray` needs the Python package 'ray'" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
