"""`penstock serve`: one process of a training run, or a server that runs use."""

import asyncio
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock import config as configuration
from penstock import shipped
from penstock.errors import PenstockError
from penstock.runtime import process
from penstock.runtime.imports import import_with_extra, kept_for_ever
from penstock.runtime.security import Security, hide_secrets
from penstock.telemetry import log, metrics, spans
from services.launch.checks.given_gpus import require_gpus
from services.launch.settings import service_settings
from services.recipe import Recipe


class Service(enum.StrEnum):
    """The services that `penstock serve` can start."""

    NATS = "nats"
    REWARD = "reward"
    ROUTER = "router"
    ROLLOUT = "rollout"
    WORKER = "worker"
    ENVIRONMENTS = "environments"
    TRAINER = "trainer"


_MODULES = {
    Service.REWARD: "services.reward.server",
    Service.ROUTER: "services.router.server",
    Service.ROLLOUT: "services.rollout.engine.server",
    Service.WORKER: "services.rollout.worker.main",
    Service.ENVIRONMENTS: "services.rollout.worker.environments.hosting.server",
    Service.TRAINER: "services.trainer.main",
}

_SETTINGS: dict[Service, Callable[[Recipe], Any]] = {
    Service.REWARD: service_settings.for_reward,
    Service.ROUTER: service_settings.for_router,
    Service.ROLLOUT: service_settings.for_engine,
    Service.WORKER: service_settings.for_worker,
    Service.ENVIRONMENTS: service_settings.for_environments,
    Service.TRAINER: service_settings.for_trainer,
}

_EXTRAS = {Service.ENVIRONMENTS: "worker"}
"""The extras of `penstock` that install services' packages, if their names differ from the service's."""

_SHARING_MEMORY = (Service.ROLLOUT, Service.TRAINER)
"""They pass weights to each other through /proc or CUDA's memory handles, which a process closed to others denies."""

_SENDING_SPANS = (Service.REWARD, Service.ROUTER, Service.WORKER, Service.ENVIRONMENTS, Service.TRAINER)
"""They send their spans from their start to their end. An engine does so itself, because it forks before it may have a
connection."""


def serve(
    context: typer.Context,
    service: Annotated[Service, typer.Argument(help="The process to run.", show_default=False)],
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", help="Recipe (TOML); a further --config overrides it.", show_default=False),
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Name of this process in its log; default: the service's.")] = "",
    error_file: Annotated[
        Path | None,
        typer.Option("--error-file", help="Also write the error that ends the process here, as JSON."),
    ] = None,
    stopped_exit_code: Annotated[
        int,
        typer.Option(
            "--stopped-exit-code",
            min=0,
            max=255,
            help="Exit code of an orderly end after a signal; a Job of Kubernetes takes 0 for the end of the run.",
        ),
    ] = 0,
    gpus: Annotated[
        int,
        typer.Option(
            "--gpus",
            min=0,
            help="GPUs of the engine or the trainer, which must be as many as its settings use; 0: not compared.",
        ),
    ] = 0,
) -> int:
    """Run one process of a training run, or a server of environments, until SIGINT, SIGTERM or SIGHUP.

    Any --section.key=value overrides the recipe.
    """
    try:
        recipe = configuration.load(Recipe, [shipped.find_recipe(path) for path in config or ()], context.args)
        security = Security.load(recipe.security)
        if service not in _SHARING_MEMORY:
            hide_secrets()
        log.configure(recipe.log, service=name or service.value, run=recipe.run.name)
        metrics.name_process(service=service.value, name=name or service.value, run=recipe.run.name)
        if service is Service.NATS:
            from penstock.bus.local_server import become_server

            folder = recipe.run.folder or recipe.run.dir / recipe.run.name
            become_server(recipe.bus, folder / "nats", security)
        if gpus:
            require_gpus(recipe, service.value, num_gpus=gpus)
        settings = _SETTINGS[service](recipe)
        with kept_for_ever():
            module = import_with_extra(
                _MODULES[service], f"penstock serve {service}", extra=_EXTRAS.get(service, service.value)
            )
    except PenstockError as error:
        return process.report_error(error, file=error_file)
    if recipe.trace.max_gib and recipe.bus.url:
        spans.open_buffer(name or service.value)

    async def run(stop: asyncio.Event) -> None:
        if spans.buffer() is None or service not in _SENDING_SPANS:
            await module.serve(settings, stop, security=security)
            return
        from penstock.bus.span_stream import sending_spans

        async with sending_spans(recipe.bus, run=recipe.run.name, security=security):
            await module.serve(settings, stop, security=security)

    try:
        return process.run(run, error_file=error_file, stopped_code=stopped_exit_code)
    finally:
        spans.close_buffer()
