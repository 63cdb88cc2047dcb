"""`penstock slurm`: writes the sbatch file of a training run, and submits it."""

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from penstock.config import RunConfig
from penstock.errors import ConfigError, SetupError
from penstock.runtime.disk_space import disk_full_reported
from penstock.runtime.files import write_atomically
from penstock.runtime.hub import offline
from penstock.runtime.imports import import_with_extra
from services.cli.arguments import RecipeArgument, load_recipes, sort_arguments
from services.launch.checks.precision import require_same_precision
from services.launch.run_folder import RunFolder, dump_repeatable
from services.launch.run_plan import make_plan
from services.launch.settings import hub_data, hub_models, run_inputs
from services.launch.slurm import submission
from services.launch.slurm.placement import NodeShare, place
from services.launch.slurm.script import job_script
from services.recipe import Recipe


def slurm(
    context: typer.Context,
    recipe: RecipeArgument = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Nodes of the job.")] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the run folder with its sbatch file, and submit nothing.")
    ] = False,
) -> int:
    """Train on a Slurm cluster: write an sbatch file into a new run folder, and submit it.

    Section [slurm] has the job's partition, account, time, GPUs and container. Engines and workers are divided among
    the nodes; the first one also has the trainer. Any --section.key=value overrides the recipe.
    """
    if not dry_run:
        submission.require_sbatch()
    recipes, overrides = sort_arguments(recipe, context.args)
    settings = load_recipes(recipes, overrides)
    if settings.launch.backend != "local":
        raise ConfigError(
            f"launch.backend = {settings.launch.backend!r}: a job of `penstock slurm` starts each node's processes "
            "there; leave it out"
        )
    shares = place(settings, num_nodes=nodes)
    if any(share.num_engines for share in shares):  # the first node may have none, and then compares nothing
        require_same_precision(settings, has_gpus=settings.slurm.gpus_per_node > 0)
    plan = make_plan(_of_node(settings, shares[0]), _gpus(settings), own_bus=not settings.bus.url)
    for share in shares[1:]:
        make_plan(_of_node(settings, share), _gpus(settings), own_bus=False, trains=False)
    _require_not_begun(settings.run)
    unfetched: list[str] = []
    if not settings.slurm.container_image:  # else model and data may be in the container only
        settings, unfetched = _checked(settings)
    folder = RunFolder.create(settings.run)
    absolute = folder.path.absolute()
    script = absolute / "job.sh"
    job = job_script(settings, absolute, shares, working_directory=Path.cwd())
    _write(absolute, {"recipe.toml": dump_repeatable(settings), script.name: job})
    lines = [f"run folder {absolute}", *plan.describe(), *_others(shares), *unfetched]
    if dry_run:
        lines.append(f"not submitted; read {script}, then `sbatch {script}`")
    else:
        lines += _what_to_look_at(submission.submit(script), absolute)
    sys.stdout.write("\n".join([*lines, ""]))
    return 0


def _checked(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Check what `penstock train` checks, as far as it needs no download.

    Returns:
        The recipe with its cached models, and a line for each model and data set that the cache lacks.

    Raises:
        ConfigError: the recipe does not fit its model or data.
        DataError: a row is wrong.
    """
    run_inputs.require_inputs_without_model(recipe)
    recipe, unfetched = hub_models.with_cached_models(recipe)
    if not unfetched:
        run_inputs.require_inputs(recipe)
    rows = import_with_extra("services.launch.checks.row_check", "penstock slurm", extra="trainer")
    with_sets = recipe.evaluation.is_in_training
    uncached = hub_data.describe_uncached(recipe, with_sets=with_sets)
    if not uncached:
        with offline():
            rows.check_rows(recipe, with_sets=with_sets, say=typer.echo)
    return recipe, [*unfetched, *uncached]


def _require_not_begun(run: RunConfig) -> None:
    """Check that no job's run has begun in the folder that the recipe gives.

    Raises:
        SetupError: one has; the job that continues it is there already.
    """
    if run.folder is not None and RunFolder(run.folder).config_file.exists() and (run.folder / "job.sh").exists():
        raise SetupError(
            f"run.folder = {str(run.folder)!r} holds a run already; `sbatch {run.folder}/job.sh` continues it, also "
            "on other nodes, once shares=() and --nodes in that file are changed"
        )


def _write(folder: Path, contents: Mapping[str, str]) -> None:
    """Write files into the run folder; if they cannot be written, a folder that was empty before goes.

    Raises:
        SetupError: the disk is full.
    """
    was_empty = not any(folder.iterdir())
    try:
        with disk_full_reported(folder, "make room and give the command again"):
            for name, content in contents.items():
                write_atomically(folder / name, content)
    except BaseException:
        if was_empty:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _of_node(recipe: Recipe, share: NodeShare) -> Recipe:
    """Return the recipe with the engines and workers of one node only."""
    rollout = {"replicas": share.unified, "prefill": share.prefill, "decode": share.decode}
    return recipe.model_copy(
        update={
            "rollout": recipe.rollout.model_copy(update=rollout),
            "worker": recipe.worker.model_copy(update={"num": share.workers}),
        }
    )


def _gpus(recipe: Recipe) -> list[str]:
    if recipe.trainer.device == "cuda" and not recipe.slurm.gpus_per_node:
        raise ConfigError(
            "trainer.device = 'cuda', and slurm.gpus_per_node = 0; set it to the number of GPUs that each node has"
        )
    return [str(index) for index in range(recipe.slurm.gpus_per_node)]


def _others(shares: Sequence[NodeShare]) -> Iterator[str]:
    if len(shares) > 1:
        yield "the above on the first node"
        for number, share in enumerate(shares[1:], start=2):
            yield f"node {number}: {share.describe()}"


def _what_to_look_at(job: str, folder: Path) -> list[str]:
    return [
        f"job {job} is submitted",
        f"  squeue --jobs={job}                       # whether it runs",
        f"  tail -F {folder}/slurm-{job}.log",
        f"  penstock status {folder}",
        f"  penstock view {folder}",
        f"  scancel --batch --signal=USR1 {job}       # ends it after its step, with a checkpoint",
        f"  sbatch {folder}/job.sh      # continues it then",
    ]
