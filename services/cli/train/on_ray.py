"""`penstock train --launch.backend=ray`: the checks that need a cluster, and the run on it."""

import asyncio
import functools
import sys
from pathlib import Path

from penstock.model import hub
from penstock.runtime.security import Security
from services.launch.on_ray import launch
from services.launch.on_ray.addresses import require_launchable
from services.launch.on_ray.cluster import Cluster, connected
from services.launch.run_folder import RunFolder
from services.launch.settings import hub_models, run_inputs
from services.recipe import Recipe


def train(settings: Recipe, folder: RunFolder | None, *, dry_run: bool, view: bool) -> int:
    """Run `settings` on the Ray cluster of `launch.ray_address`; `folder` is that of a run to continue.

    Model and data are checked on the hosts that use them. The model's files other than weights are fetched here too,
    because the commit of a model on the Hugging Face Hub is pinned here.

    Raises:
        UserError: the recipe, the cluster or one of its hosts is not as it must be.
    """
    from services.cli.train.command import run_in_folder

    require_launchable(settings, Path.cwd(), resumed=None if folder is None else folder.path)
    security = Security.load(settings.security)
    with connected(settings.launch):  # before signals are handled: Ray has handlers of its own
        settings = hub_models.with_models(settings, _without_weights)
        run_inputs.require_at_launcher(settings)
        if dry_run:
            cluster = Cluster(settings, RunFolder.place(settings.run) if folder is None else folder.path)
            path = RunFolder.pattern(settings.run) if folder is None else str(folder.path)
            lines = [*asyncio.run(launch.examine(cluster, settings)), *RunFolder.describe(path)]
            sys.stdout.write("\n".join([*lines, ""]))
            return 0
        settings = run_inputs.pin_inputs(
            settings, with_sets=settings.evaluation.is_in_training, with_demonstrations=True
        )
        is_new = folder is None
        folder = RunFolder((folder or RunFolder.create(settings.run)).path.absolute())
        try:
            cluster = Cluster(settings, folder.path)
            lines = asyncio.run(launch.examine(cluster, settings))
        except BaseException:  # Ctrl-C too
            if is_new:
                folder.discard_unused()
            raise
        sys.stdout.write("\n".join([f"run folder {folder.path}", *lines, ""]))
        run = functools.partial(launch.launch, settings, folder, security=security, cluster=cluster)
        return run_in_folder(settings, folder, run, is_new=is_new, view=view)


def _without_weights(path: Path, *, setting: str, with_weights: bool) -> Path:
    return hub.fetch(path, setting=setting, with_weights=False)
