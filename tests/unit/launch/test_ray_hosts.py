"""What hosts of a Ray cluster are asked before anything starts there, without Ray."""

import importlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config import load
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


async def test_a_host_is_checked_with_the_launcher_s_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that its processes get; its PATH stays its own."""
    handed: list[Mapping[str, str]] = []

    def check(text: str, services: Sequence[str], folder: str, defaults: Mapping[str, str]) -> tuple[Any, Any]:
        handed.append(defaults)
        return {}, []

    def remote(function: Any) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *given: Remote(function(*given))))

    monkeypatch.setenv("HF_TOKEN", "hf_launchers")
    with faking_ray(monkeypatch):
        module: Any = importlib.import_module("services.launch.on_ray.cluster")
        monkeypatch.setattr(module.inputs_check, "check", check)
        vars(module.ray).update(
            remote=remote,
            nodes=lambda: [NODE],
            get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "head"),
            util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1"),
            cloudpickle=SimpleNamespace(register_pickle_by_value=lambda module: None),
        )
        cluster = module.Cluster(load(Recipe, [], []), None)
        await cluster.look()
    assert [host.unfit or host.unfit_for for host in cluster.hosts] == [{}]
    assert [(each["HF_TOKEN"], "PATH" in each) for each in handed] == [("hf_launchers", False)]


def test_the_hub_is_looked_at_where_the_launcher_s_variables_say() -> None:
    """If the host does not say: huggingface_hub reads its variables once, when it is imported."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own["HF_ENDPOINT"] = "http://its"
    done = subprocess.run([sys.executable, "-c", CHECK], env=own, capture_output=True, text=True, check=False)
    assert done.stdout == "{} /launchers http://its\n", done.stderr
