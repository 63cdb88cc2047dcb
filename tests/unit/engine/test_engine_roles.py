"""What an engine's role asks for, and what it refuses, before SGLang is there."""

import asyncio
import http.server
import importlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config import ModelConfig, NetworkConfig, load
from penstock.errors import ConfigError, InvalidRequestError, NotReadyError, SetupError
from penstock.v1 import common_pb2, generate_pb2
from services.launch.run_plan import make_plan
from services.recipe import Recipe
from services.reward.config import RewardConfig
from services.rollout.engine import disaggregation
from services.rollout.engine.config import RolloutConfig
from services.rollout.engine.pd_barrier import PdBarrier
from services.rollout.worker.config import WorkerConfig
from services.router.config import RouterConfig

LOCAL = NetworkConfig()


def config(**rollout: Any) -> RolloutConfig:
    return RolloutConfig.model_validate(rollout)


def server_args(config: RolloutConfig, *, cuda: bool) -> dict[str, Any]:
    return disaggregation.server_args(config, LOCAL, bootstrap_port=23_456, cuda=cuda)


def bootstrap(**fields: Any) -> generate_pb2.Bootstrap:
    return generate_pb2.Bootstrap(**({"host": "10.0.0.1", "port": 7000, "room": 5, "policy_version": 3} | fields))


@pytest.mark.parametrize(("prefill", "decode", "missing"), [(1, 0, "decode"), (0, 2, "prefill")])
def test_half_of_a_pool_is_refused(tmp_path: Path, prefill: int, decode: int, missing: str) -> None:
    """Where nothing could be generated, the error names what is missing; with a unified engine, something can."""
    (tmp_path / "config.json").write_text("{}")
    counts = [f"--model.path={tmp_path}", f"--rollout.prefill={prefill}", f"--rollout.decode={decode}"]
    with pytest.raises(ConfigError, match=f"set {missing} to 1 or more, or add unified engines"):
        load(Recipe, (), [*counts, "--rollout.replicas=0"])
    assert load(Recipe, (), [*counts, "--rollout.replicas=1"]).rollout.replicas == 1


def test_one_port_is_not_for_two(tmp_path: Path) -> None:
    """Engines and workers of one machine need a port each; an engine of its own, as in a container, may have it."""
    recipe = Recipe(model=ModelConfig(path=tmp_path), rollout=RolloutConfig(port=7010, replicas=2))
    with pytest.raises(ConfigError, match=r"rollout\.port = 7010 cannot be had by the 2 engines .*; set it to 0"):
        make_plan(recipe, [], own_bus=False)
    make_plan(recipe.model_copy(update={"rollout": RolloutConfig(port=7010)}), [], own_bus=False)
    workers = recipe.model_copy(update={"rollout": RolloutConfig(), "worker": WorkerConfig(num=3, port=7004)})
    with pytest.raises(ConfigError, match=r"worker\.port = 7004 cannot be had by the 3 workers"):
        make_plan(workers, [], own_bus=False)
    services = {"router": RouterConfig(port=7001), "reward": RewardConfig(port=7000, http_port=7001)}
    shared = recipe.model_copy(update={"rollout": RolloutConfig(), **services})
    with pytest.raises(ConfigError, match=r"router\.port = 7001 is reward\.http_port too"):
        make_plan(shared, [], own_bus=False)


def test_train_starts_each_role(tmp_path: Path) -> None:
    """As many of each as the recipe says, told apart by name, whatever role the recipe itself names."""
    (tmp_path / "config.json").write_text("{}")
    counts = ["--rollout.replicas=0", "--rollout.prefill=1", "--rollout.decode=2", "--rollout.role=prefill"]
    recipe = load(Recipe, (), [f"--model.path={tmp_path}", f"--run.dir={tmp_path}/runs", *counts])
    processes = make_plan(recipe, [], own_bus=False).processes
    roles = {process.name: process.overrides for process in processes if process.service == "rollout"}
    assert roles == {
        "prefill-0": ("--rollout.role=prefill",),
        "decode-0": ("--rollout.role=decode",),
        "decode-1": ("--rollout.role=decode",),
    }


def test_sglang_is_told_of_the_role() -> None:
    """A peer waits seconds for the other, and a machine's own address is not for engines on loopback alone."""
    prefill = server_args(config(role="prefill", transfer_backend="nixl"), cuda=False)
    assert (prefill["disaggregation_mode"], prefill["disaggregation_transfer_backend"]) == ("prefill", "nixl")
    assert prefill["disaggregation_bootstrap_port"] == 23_456
    assert "disaggregation_bootstrap_port" not in server_args(config(role="decode"), cuda=True)
    environment = disaggregation.environment(config(role="decode"), LOCAL, cuda=False)
    assert environment["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"] == "10"
    assert environment["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"] == "10"
    assert environment["SGLANG_HOST_IP"] == "127.0.0.1"
    assert environment["MC_FORCE_TCP"] == "1"
    open_to_others = disaggregation.environment(config(role="decode"), NetworkConfig(host="0.0.0.0"), cuda=True)
    assert not {"SGLANG_HOST_IP", "MC_FORCE_TCP"} & open_to_others.keys()
    assert disaggregation.environment(config(), LOCAL, cuda=False) == {}


def test_the_lease_says_where_the_kv_is() -> None:
    """The host and port of a prefill engine; a decode engine has none, a unified one says nothing at all."""
    described = {
        role: disaggregation.describe(config(role=role, transfer_backend="nixl"), host="node-3", bootstrap_port=7000)
        for role in disaggregation.ROLES
    }
    assert described["unified"] is None
    assert described["prefill"] == common_pb2.Disaggregation(
        transfer_backend="nixl", tensor_parallel=1, bootstrap_host="node-3", bootstrap_port=7000
    )
    assert described["decode"] == common_pb2.Disaggregation(transfer_backend="nixl", tensor_parallel=1)


@pytest.mark.parametrize(
    ("backend", "cuda", "message"),
    [
        ("mooncake", False, "needs the package mooncake.*pip install mooncake-transfer-engine-non-cuda, or use nixl"),
        ("mooncake", True, "pip install mooncake-transfer-engine-cuda13"),
        ("nixl", False, r"needs the package nixl.*pip install 'penstock\[disaggregation\]'"),
    ],
)
def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch, backend: str, cuda: bool, message: str) -> None:
    """Before anything is loaded, with how to install it; a unified engine needs none."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(SetupError, match=message):
        disaggregation.require_transfer_backend(config(role="prefill", transfer_backend=backend), cuda=cuda)
    disaggregation.require_transfer_backend(config(transfer_backend=backend), cuda=cuda)


def test_a_wheel_that_does_not_load_says_what_it_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the system's library and its package."""

    def fail(_name: str) -> None:
        raise ImportError("libnuma.so.1: cannot open shared object file")

    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(SetupError, match=r"libnuma\.so\.1: cannot open.*apt-get install libnuma1"):
        disaggregation.require_transfer_backend(config(role="decode", transfer_backend="mooncake"), cuda=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"host": ""}, "bootstrap.host = ''"),
        ({"host": "2.2.2.2"}, "bootstrap.host = '2.2.2.2'"),
        ({"port": 0}, "bootstrap.port = 0"),
        ({"port": 70_000}, "bootstrap.port = 70000"),
        ({"room": 0}, "bootstrap.room = 0"),
        ({"room": 1 << 62}, "bootstrap.room = "),
    ],
)
def test_impossible_pairs_are_refused(fields: dict[str, Any], message: str) -> None:
    """Naming the field and its value."""
    request = generate_pb2.GenerateRequest(bootstrap=bootstrap(**fields))
    with pytest.raises(InvalidRequestError, match=message):
        disaggregation.check_bootstrap(request, disaggregated=True)


def test_only_engines_of_a_pair_take_its_requests() -> None:
    """One of a pair without the other, and a unified engine with one."""
    request = generate_pb2.GenerateRequest(bootstrap=bootstrap())
    assert disaggregation.check_bootstrap(request, disaggregated=True) == bootstrap()
    with pytest.raises(InvalidRequestError, match="this engine is unified"):
        disaggregation.check_bootstrap(request, disaggregated=False)
    with pytest.raises(InvalidRequestError, match="bootstrap is missing"):
        disaggregation.check_bootstrap(generate_pb2.GenerateRequest(), disaggregated=True)
    assert disaggregation.check_bootstrap(generate_pb2.GenerateRequest(), disaggregated=False) is None


@pytest.fixture
def bootstrap_server() -> Iterator[http.server.HTTPServer]:
    """Answers as SGLang's does while no prefill worker has registered with it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        status = 503

        def do_GET(self) -> None:
            self.send_response(self.status)
            self.end_headers()

        def log_message(self, *_arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_prefill_engine_that_cannot_be_found_does_not_start(bootstrap_server: http.server.HTTPServer) -> None:
    """SGLang itself would serve on, and every pair would fail."""
    port = bootstrap_server.server_address[1]
    with pytest.raises(SetupError, match=f"127.0.0.1:{port}.*503"):
        disaggregation.require_registered("127.0.0.1", port)
    bootstrap_server.RequestHandlerClass.status = 200  # type: ignore[attr-defined]
    disaggregation.require_registered("0.0.0.0", port)


async def test_the_barrier_lets_through_who_fits_the_version_after_it() -> None:
    """Requests that wait while weights change are looked at when it opens, not when they came."""
    barrier = PdBarrier()
    assert await barrier.passed(bootstrap(policy_version=0)) == 0
    barrier.close()
    older, newer = [asyncio.ensure_future(barrier.passed(bootstrap(policy_version=version))) for version in (0, 7)]
    await asyncio.sleep(0)
    barrier.version = 7
    await asyncio.sleep(0)
    assert not older.done()
    assert not newer.done()
    barrier.open()
    assert await newer == 7
    with pytest.raises(NotReadyError, match="policy_version = 0, but this engine serves version 7"):
        await older
