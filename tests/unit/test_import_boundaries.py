"""Who may import whom, as docs/architecture.md draws it."""

import ast
import functools
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_SERVICES = ("reward", "router", "rollout/engine", "rollout/worker", "trainer", "view")
_OF_ROLLOUT = ("rollout/testing",)
"""May import engine and worker, and no other service."""
_MEETING_POINTS = ("services.recipe", "services.cli", "services.launch", "services.doctor", "services.plan")


def _imports(folder: str) -> list[tuple[str, str]]:
    """(file, imported module) for every import of a folder's Python files, those inside functions included."""
    return [
        (str(file.relative_to(_ROOT)), name) for file in (_ROOT / folder).rglob("*.py") for name in _imports_of(file)
    ]


@functools.cache
def _imports_of(file: Path) -> Sequence[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):  # what is imported may be a module
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def _is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def test_penstock_imports_nothing_of_the_services() -> None:
    """The library that services share stands without any of them."""
    assert {found for found in _imports("penstock") if _is_within(found[1], "services")} == set()


def test_penstock_names_services_only_where_it_starts_them() -> None:
    """A module imported by its name is imported, too."""
    named = {
        file.relative_to(_ROOT).as_posix()
        for file in (_ROOT / "penstock").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(), str(file)))
        if isinstance(node, ast.Constant) and re.fullmatch(r"services\.\S*", str(node.value))
    }
    assert named == {"penstock/command.py", "penstock/testing/train_process.py"}


@pytest.mark.parametrize("folder", ["penstock", "services", "bench", "tools", "models", "examples"])
def test_nothing_but_tests_imports_tests(folder: str) -> None:
    """What tests and benchmarks share is in penstock.testing and services.rollout.testing."""
    assert {found for found in _imports(folder) if _is_within(found[1], "tests")} == set()


@pytest.mark.parametrize("service", _SERVICES)
def test_a_service_imports_penstock_and_itself(service: str) -> None:
    """Services meet on the wire only: none imports another."""
    own = f"services.{service.replace('/', '.')}"
    found = {found for found in _imports(f"services/{service}") if _is_within(found[1], "services")}
    assert {(file, module) for file, module in found if not _is_within(module, own)} == set()


@pytest.mark.parametrize("folder", _OF_ROLLOUT)
def test_what_engine_and_worker_share_imports_no_other_service(folder: str) -> None:
    """Their tests' kit stands for the rollout only."""
    found = {found for found in _imports(f"services/{folder}") if _is_within(found[1], "services")}
    assert {(file, module) for file, module in found if not _is_within(module, "services.rollout")} == set()


def test_what_runs_in_sglangs_processes_imports_nothing_of_the_engines_server() -> None:
    """SGLang imports the plugin in every process that it starts, also in those that serve nothing."""
    own = "services.rollout.engine.sglang_plugin"
    found = {found for found in _imports(own.replace(".", "/")) if _is_within(found[1], "services")}
    assert {(file, module) for file, module in found if not _is_within(module, own)} == set()


def test_the_command_line_is_imported_by_nobody() -> None:
    """It is the outermost: what it shares with the launcher is the launcher's."""
    others = (found for room in ("launch", "plan", "doctor") for found in _imports(f"services/{room}"))
    assert {found for found in others if _is_within(found[1], "services.cli")} == set()


def test_only_recipe_cli_launch_doctor_and_plan_know_all_services() -> None:
    """Nobody else imports them: a service receives its own settings, never the recipe that imports it."""
    outsiders = {
        (file, module)
        for file, module in (*_imports("penstock"), *_imports("services"))
        if any(_is_within(module, point) for point in _MEETING_POINTS)
        and not file.startswith(
            ("services/recipe.py", *(f"services/{room}/" for room in ("cli", "launch", "doctor", "plan")))
        )
    }
    assert outsiders == set()


def test_the_trainers_controller_commands_the_backend_through_its_protocol() -> None:
    """Only the assembly knows which backend it is; loop, ledger and checkpoints hold no tensor."""
    computing = tuple(
        f"services/trainer/{room}/" for room in ("backend", "batching", "algorithm", "replay", "weight_sync")
    )
    controller = {found for found in _imports("services/trainer") if not found[0].startswith(computing)}
    backends = {found for found in controller if _is_within(found[1], "services.trainer.backend")}
    assert {found for found in controller if _is_within(found[1], "torch")} == set()
    of_others = {module for file, module in backends if not file.endswith("/assembly.py")}
    assert {module for module in of_others if not _is_within(module, "services.trainer.backend.base")} == set()
