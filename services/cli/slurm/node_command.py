"""`penstock slurm-node`: what the jobs of `penstock slurm` run on nodes other than the first; not for people."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock import config as configuration
from penstock.errors import ConfigError
from penstock.runtime import process
from penstock.runtime.security import Security, hide_secrets
from penstock.telemetry import log
from services.cli.arguments import sort_arguments
from services.launch.run_folder import RunFolder
from services.launch.slurm.placement import NodeShare
from services.launch.terminal.lasting_output import lasting_output
from services.recipe import Recipe


def slurm_node(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="The run to serve.", show_default=False)],
    unified: Annotated[int, typer.Option("--unified", min=0, help="Unified engines.")] = 0,
    prefill: Annotated[int, typer.Option("--prefill", min=0, help="Prefill engines.")] = 0,
    decode: Annotated[int, typer.Option("--decode", min=0, help="Decode engines.")] = 0,
    workers: Annotated[int, typer.Option("--workers", min=0, help="Workers.")] = 0,
) -> int:
    """Serve a run whose trainer another node starts, until it ends; --network.host and others are this node's."""
    from services.launch.slurm.node import serve_node

    others, overrides = sort_arguments(None, context.args)
    if others:
        raise ConfigError(f"{others[0]}: slurm-node takes one run folder; leave it out")
    share = NodeShare(unified=unified, prefill=prefill, decode=decode, workers=workers)
    folder = RunFolder(run)
    has_begun = folder.config_file.exists()
    recipe = configuration.load(Recipe, [folder.config_file if has_begun else run / "recipe.toml"], overrides)
    security = Security.load(recipe.security)
    hide_secrets()
    name = recipe.network.advertised
    folder.logs.mkdir(exist_ok=True)
    log.configure(recipe.log, service="launcher", run=recipe.run.name, file=folder.logs / f"{name}.log")

    def write(line: str) -> None:
        sys.stdout.write(f"{name}: {line}\n")
        sys.stdout.flush()

    async def serve(stop: asyncio.Event) -> None:
        await serve_node(folder, share, overrides, stop, security, write)

    with lasting_output():
        return process.run(serve)
