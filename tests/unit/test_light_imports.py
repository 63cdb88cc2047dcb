"""What installs without torch and sglang also imports without them."""

import functools
import importlib.metadata
import importlib.util
import json
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_PROGRAM = """
import importlib, pkgutil, sys

class Blocker:
    blocked = {"torch", "sglang", "transformers"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            raise ImportError(f"{name} must not be imported here")

sys.meta_path.insert(0, Blocker())
name = sys.argv[1]
module = importlib.import_module(name)
if name == "penstock":
    for found in pkgutil.walk_packages(module.__path__, "penstock."):
        # penstock.weights is shared by trainer and engine and made of tensors.
        if not found.name.startswith("penstock.weights") and not found.name.endswith("__main__"):
            importlib.import_module(found.name)
"""

_COMMAND = """
import json, sys

class Blocker:
    blocked = set(json.loads(sys.argv[1]))

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            raise ModuleNotFoundError(f"{name} is not installed", name=name)

sys.meta_path.insert(0, Blocker())
from services.cli.app import main
sys.exit(main(json.loads(sys.argv[2])))
"""


@pytest.mark.parametrize("name", ["penstock", "services.reward.server", "services.router.server"])
def test_imports_without_torch_sglang_and_transformers(name: str) -> None:
    """The reward service, the router and what all share need no deep-learning library."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM, name], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def required(name: str, extras: frozenset[str]) -> set[str]:
    """What `pip install 'name[extras]'` brings, transitively, by what the installed distributions say of themselves."""
    todo, done = [(canonicalize_name(name), extras)], set[tuple[str, frozenset[str]]]()
    while todo:
        one = todo.pop()
        if one in done:
            continue
        done.add(one)
        for requirement in _requirements(one[0]):
            wanted = requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in one[1] | {""}
            )
            if wanted:
                todo.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return {found for found, _ in done}


@functools.cache
def _requirements(name: str) -> list[Requirement]:
    try:
        return list(map(Requirement, importlib.metadata.requires(name) or []))
    except importlib.metadata.PackageNotFoundError:  # it is for another platform
        return []


_distributions_by_module = functools.cache(importlib.metadata.packages_distributions)


@pytest.mark.parametrize("extra", ["", "reward", "router"])
def test_installs_without_torch_sglang_and_transformers(extra: str) -> None:
    """Neither penstock itself nor the reward service nor the router brings a deep-learning library with it."""
    found = required("penstock", frozenset({extra}))
    assert {"grpcio", "nats-py"} <= found
    assert ("math-verify" in found) == (extra == "reward")
    assert not {"torch", "sglang", "transformers"} & found


_WALK = """
import importlib, json, pkgutil, sys

class Blocker:
    blocked = set(json.loads(sys.argv[1]))

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            raise ModuleNotFoundError(f"{name} is not installed", name=name)

sys.meta_path.insert(0, Blocker())
for name in json.loads(sys.argv[2]):
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(package, "__path__", []), f"{name}."):
        importlib.import_module(found.name)
"""


def others_than(extra: str) -> list[str]:
    """The modules that `pip install 'penstock[extra]'` does not bring, of all that are installed here."""
    brought = required("penstock", frozenset({extra}))
    return [
        module
        for module, distributions in _distributions_by_module().items()
        if not {canonicalize_name(name) for name in distributions} & brought
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "packages"),
    [
        ("reward", ["services.reward"]),
        ("router", ["services.router.server", "services.router.balancing"]),
        ("openai", ["services.router"]),
        ("worker", ["services.rollout.worker"]),
        ("trainer", ["services.trainer"]),
        ("view", ["services.view"]),
    ],
)
def test_a_service_imports_what_its_extra_brings(extra: str, packages: list[str]) -> None:
    """Every module of it, as in an image that has this extra and nothing else."""
    arguments = [json.dumps(others_than(extra)), json.dumps(packages)]
    done = subprocess.run([sys.executable, "-c", _WALK, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_openai_frontend_installs_without_torch_and_sglang() -> None:
    """It has transformers, for its tokenizers."""
    found = required("penstock", frozenset({"openai"}))
    assert {"fastapi", "transformers"} <= found
    assert not {"torch", "sglang"} & found


def test_the_walk_over_requirements_finds_what_is_deep() -> None:
    """The check above could fail: the trainer and the engine do bring them."""
    assert {"torch", "transformers"} <= required("penstock", frozenset({"trainer"}))
    assert {"torch", "sglang", "transformers"} <= required("penstock", frozenset({"rollout"}))


def test_the_reward_server_process_holds_no_sympy() -> None:
    """math-verify and sympy, which run on the policy's text, are in the worker processes only."""
    program = "import services.reward.server, sys; assert not {'sympy', 'math_verify', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["version"], 0),
        (["init"], 0),
        (["config", "tiny-cpu"], 0),
        (["train", "tiny-cpu", "--dry-run"], 0),
        (["doctor", "tiny-cpu"], 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_line_runs_with_what_penstock_itself_requires(command: list[str], code: int) -> None:
    """Without any extra, as the reward service's image or a person's first look has it; what is missing is a fault."""
    blocked = others_than("")
    assert {"PIL", "torch", "fastapi", "pyarrow"} <= set(blocked)
    arguments = [json.dumps(blocked), json.dumps(command)]
    done = subprocess.run([sys.executable, "-c", _COMMAND, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert done.stderr == ""
    assert ("pip install 'penstock[" in done.stdout) == (code == 1)


def test_the_command_line_starts_without_numpy() -> None:
    """Every command reads settings, and records, which bring numpy, are needed by few of them."""
    program = "import services.cli, sys; assert not {'numpy', 'penstock.records'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
