"""What a person types, and what becomes of their mistakes.

The recipe is read and checked before anything heavy is imported, so a mistyped key is answered in half a second.
A mistake is answered by one line, `error: ...`, and exit code 2; there is no traceback for what a person can mend.
"""

import enum
import functools
import importlib
import sys
from collections.abc import Iterable
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from penstock import config as configuration
from penstock.config import LogConfig
from penstock.errors import ConfigError, PenstockError, SetupError, UserError
from penstock.runtime import process, security
from penstock.runtime.security import Security
from penstock.telemetry import log
from services.cli import replicas
from services.recipe import Recipe, ServiceRecipe
from services.reward.config import RewardConfig

app = typer.Typer(
    help="Fully asynchronous GRPO post-training on verifiable rewards.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(replicas.app, name="replicas")

_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
_EXIT_INTERRUPTED = 130


class Service(enum.StrEnum):
    """What `penstock serve` can start."""

    NATS = "nats"
    REWARD = "reward"
    ROUTER = "router"
    ROLLOUT = "rollout"
    WORKER = "worker"
    TRAINER = "trainer"


_MODULES = {
    Service.REWARD: "services.reward.server",
    Service.ROUTER: "services.router.server",
    Service.ROLLOUT: "services.rollout.engine.server",
    Service.WORKER: "services.rollout.worker.main",
    Service.TRAINER: "services.trainer.main",
}


_WITHOUT_MODEL = (Service.NATS, Service.REWARD, Service.ROUTER)
_SHARING_MEMORY = (Service.ROLLOUT, Service.TRAINER)
"""Weights go from one to the other through /proc or CUDA's memory handles, which a closed process does not give."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code: 2 for what a person must change, 1 for every other failure."""
    try:
        code = app(arguments, prog_name="penstock", standalone_mode=False)
    except TyperException as error:
        message = " ".join(error.format_message().split()).rstrip(".")
        return process.tell(UserError(f"{message}; see `penstock --help`"))
    except PenstockError as error:
        return process.tell(error)
    except (KeyboardInterrupt, typer.Abort):
        return _EXIT_INTERRUPTED
    return code if isinstance(code, int) else 0


@app.command(context_settings=_OVERRIDES)
def serve(
    context: typer.Context,
    service: Annotated[Service, typer.Argument(help="The process to run.", show_default=False)],
    config: Annotated[
        Path | None, typer.Option("--config", help="Recipe (TOML); default: all defaults.", show_default=False)
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Name of this process in its log; default: the service's.")] = "",
) -> int:
    """Run one process of a training run until it is told to stop. Any --section.key=value overrides the recipe."""
    recipe = configuration.load(ServiceRecipe if service in _WITHOUT_MODEL else Recipe, config, context.args)
    security.install(Security.load(recipe.security))
    if service not in _SHARING_MEMORY:
        security.hide_secrets()
    log.configure(recipe.log, service=name or service.value)
    if service is Service.NATS:
        from penstock.bus.local_server import become_server

        become_server(recipe.bus, (recipe.run.folder or recipe.run.dir / recipe.run.name) / "nats")
    module = _import_service(service, f"penstock serve {service}")
    return process.run(lambda stop: module.serve(recipe, stop))


def _import_service(service: Service, command: str) -> Any:
    return _import_module(_MODULES[service], command, extra=service.value)


def _import_module(name: str, command: str, *, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("penstock", "services"):
            raise
        raise SetupError(
            f"`{command}` needs the Python package {error.name!r}, which is not installed; "
            f"`pip install 'penstock[{extra}]'`"
        ) from None


@app.command(context_settings=_OVERRIDES)
def score(
    context: typer.Context,
    source: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Lines to judge; - or none: standard input.")
    ] = None,
    profile: Annotated[str, typer.Option("--profile", help="Profile of the lines that name none.")] = "math",
    output: Annotated[Path | None, typer.Option("--output", help="File to write; default: standard output.")] = None,
    address: Annotated[
        str, typer.Option("--address", metavar="HOST:PORT", help="A service that runs; default: a private one.")
    ] = "",
    config: Annotated[
        Path | None, typer.Option("--config", help="Recipe (TOML) of the private service; default: all defaults.")
    ] = None,
) -> int:
    """Judge lines {"id", "gold", "response"} of a file, and write lines {"id", "score", "status", ...} in their order.

    "gold" is a string or a list of them. Optional: "golds", "prompt", "profile", "deadline_s". A bad line gets the
    status INVALID and the exit code 1. Any --reward.key=value overrides the recipe of the private service.
    """
    from services.cli import score as scoring

    sources, overrides = _sort_arguments(source, context.args)
    if len(sources) > 1:
        raise ConfigError(f"give one file, or none for standard input; given: {', '.join(map(str, sources))}")
    source = None if sources in ([], [Path("-")]) else sources[0]
    if address:
        if config is not None or not all(override.startswith("--security.") for override in overrides):
            raise ConfigError(
                f"--address {address} names a service with settings of its own; leave out these here, all but "
                "--security.key=value"
            )
        security.install(Security.load(configuration.load(ServiceRecipe, None, overrides).security))
        log.configure(LogConfig(level="warning"), service="score")
        service, max_queue = functools.partial(scoring.running_at, address), RewardConfig().max_queue
    else:
        recipe = configuration.load(ServiceRecipe, config, ["--log.level=warning", *overrides])
        log.configure(recipe.log, service="score")
        security.hide_secrets()
        _import_service(Service.REWARD, "penstock score")
        service, max_queue = functools.partial(scoring.private_service, recipe.reward), recipe.reward.max_queue
    return scoring.score(source=source, output=output, profile=profile, service=service, max_queue=max_queue)


@app.command(context_settings=_OVERRIDES)
def train(
    context: typer.Context,
    recipe: Annotated[Path | None, typer.Argument(help="Recipe (TOML).", show_default=False)] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN_FOLDER", help="Continue the run in this folder.")
    ] = None,
) -> int:
    """Start every process of a run and train to the end. Any --section.key=value overrides the recipe."""
    from services.launch import launcher
    from services.launch.run_folder import RunFolder

    recipes, overrides = _sort_arguments(recipe, context.args)
    if resume is not None:
        if recipes:
            raise ConfigError(f"--resume {resume} brings its own recipe; leave out {recipes[0]}")
        folder = RunFolder.open(resume)
        settings = configuration.load(Recipe, folder.config_file, overrides)
        security.install(Security.load(settings.security))
    else:
        settings = configuration.load(Recipe, _only(recipes), overrides)
        security.install(Security.load(settings.security))  # what is wrong with it is said before a folder is made
        folder = RunFolder.create(settings.run)
    security.hide_secrets()
    with folder.locked():
        folder.write_config(settings)
        log.configure(settings.log, service="launcher", file=folder.launcher_log)
        interrupted = False

        async def run(stop: Any) -> None:
            nonlocal interrupted
            await launcher.launch(settings, folder, stop)
            interrupted = stop.is_set()

        code = process.run(run)
    return _EXIT_INTERRUPTED if interrupted else code


@app.command(context_settings=_OVERRIDES)
def replay(
    context: typer.Context,
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run folder, or a file that --export wrote.", show_default=False)
    ],
    step: Annotated[
        int | None, typer.Option("--step", help="Optimizer step; default: the one that is recorded.", min=1)
    ] = None,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", help="Write the step to one file, for a bug report.")
    ] = None,
) -> int:
    """Compute a recorded optimizer step again, without engine or bus, and show it beside what the run logged.

    The run must have trainer.record_groups = true. Any --section.key=value shows what the same step would have done
    with another loss, bound or optimizer. Exits with 1 where the replay differs from the run.
    """
    sources, overrides = _sort_arguments(source, context.args)
    if len(sources) != 1:
        raise ConfigError(f"give one run folder or file; given: {', '.join(map(str, sources)) or 'none'}")
    log.configure(LogConfig(level="warning"), service="replay")
    replaying = _import_module("services.cli.replay", "penstock replay", extra="trainer")
    code: int = replaying.replay(sources[0], step=step, overrides=overrides, export=export)
    return code


@app.command(name="config", context_settings=_OVERRIDES)
def show_config(
    context: typer.Context,
    recipe: Annotated[Path | None, typer.Argument(help="Recipe (TOML).", show_default=False)] = None,
) -> int:
    """Print the recipe as the processes would read it: overrides applied, defaults filled in."""
    recipes, overrides = _sort_arguments(recipe, context.args)
    settings = configuration.load(Recipe, _only(recipes), overrides)
    sys.stdout.write(configuration.dump(settings))
    return 0


@app.command()
def version() -> int:
    """Print the version."""
    sys.stdout.write(f"{installed_version('penstock')}\n")
    return 0


def _sort_arguments(first: Path | None, rest: Iterable[str]) -> tuple[list[Path], list[str]]:
    """Paths and overrides apart, in whatever order they were typed."""
    arguments = [*([] if first is None else [str(first)]), *rest]
    overrides = [argument for argument in arguments if argument.startswith("-") and argument != "-"]
    return [Path(argument) for argument in arguments if argument not in overrides], overrides


def _only(recipes: list[Path]) -> Path:
    if len(recipes) != 1:
        given = ", ".join(map(str, recipes)) or "none"
        raise ConfigError(f"give one recipe, for example recipes/tiny-cpu.toml; given: {given}")
    return recipes[0]
