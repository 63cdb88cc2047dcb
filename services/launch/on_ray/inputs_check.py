"""Checks, on the host that would use them, the model, the data and the packages that a service needs.

Invariant: no module that is imported here imports huggingface_hub, which reads its variables once.
"""

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from penstock import config as configuration
from penstock.errors import PenstockError, SetupError
from services.launch.on_ray.working_folder import working_folder
from services.recipe import Recipe

_PACKAGES: Final = {
    "rollout": ("sglang", "torch"),
    "trainer": ("torch", "transformers", "pyarrow"),
    "worker": ("transformers",),
}


def check(
    recipe_text: str, services: Sequence[str], folder: str, defaults: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return why each service cannot run on this host, if it cannot, and lines for a person.

    A model on the Hugging Face Hub that this host has not cached is not looked at: the process fetches it. This
    process keeps those of `defaults` that it lacked.

    Args:
        recipe_text: The recipe, as TOML.
        services: The services that may be placed here.
        folder: The launcher's working directory.
        defaults: Variables of the launcher that the host's processes get where the host does not set them.
    """
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    reasons: dict[str, str] = {}
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="penstock-") as scratch, contextlib.chdir(working_folder(folder)):
        file = Path(scratch) / "recipe.toml"
        file.write_text(recipe_text, encoding="utf-8")
        for service in services:
            try:
                _require_packages(service)
                _CHECKS[service](configuration.load(Recipe, [file]), lines.append)
            except PenstockError as error:
                reasons[service] = " ".join(str(error).split())
    return reasons, lines


def _require_packages(service: str) -> None:
    for package in _PACKAGES[service]:
        if importlib.util.find_spec(package) is None:
            raise SetupError(
                f"the Python package {package!r} is not installed there; `pip install 'penstock[{service}]'`"
            )


def _require_own_code(recipe: Recipe) -> None:
    """Look for the packages of the recipe's environments and agents. None is imported: that runs a person's code."""
    worker = recipe.worker
    paths = {f"environments.{name}.class": each.class_ for name, each in worker.environments.items()}
    paths |= {f"agents.{name}.function": each.function for name, each in worker.agents.items()}
    for key, path in paths.items():
        module, colon, _ = path.partition(":")
        package = module.partition(".")[0]
        if colon and package and not _is_found(package):
            raise SetupError(
                f"worker.{key} = {path!r}: the Python package {package!r} is not found there; install it, put its "
                "folder on PYTHONPATH before `ray start`, or submit the run with `ray job submit --working-dir`"
            )


def _is_found(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # `__main__`
        return False


def _check_engine(recipe: Recipe, say: Callable[[str], object]) -> None:
    from services.launch.settings import hub_models, service_settings
    from services.rollout.engine.sglang import recipe_settings

    recipe_settings.require_known(recipe.rollout.sglang)
    recipe, unfetched = hub_models.with_cached_models(recipe)
    if not unfetched:
        service_settings.for_engine(recipe)


def _check_worker(recipe: Recipe, say: Callable[[str], object]) -> None:
    from services.launch.settings import hub_models, service_settings

    _require_own_code(recipe)
    recipe, unfetched = hub_models.with_cached_models(recipe)
    if not unfetched:
        anywhere = {"router_address": "host:1", "reward_address": "host:1", "router_url": "http://host:1"}
        worker = recipe.worker.model_copy(update=anywhere)  # they are known once the ports are chosen
        service_settings.for_worker(recipe.model_copy(update={"worker": worker}))


def _check_trainer(recipe: Recipe, say: Callable[[str], object]) -> None:
    from services.launch.checks.row_check import check_rows
    from services.launch.checks.training_inputs import require_trainable_without_model
    from services.launch.settings import hub_models, run_inputs

    require_trainable_without_model(recipe)
    recipe, unfetched = hub_models.with_cached_models(recipe)
    if not unfetched:
        run_inputs.require_inputs(recipe)
        check_rows(recipe, with_sets=recipe.evaluation.is_in_training, say=say)


_CHECKS: Final = {"rollout": _check_engine, "worker": _check_worker, "trainer": _check_trainer}
