"""The command `penstock replay`; `run` does the work."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.config import LogConfig
from penstock.errors import ConfigError
from penstock.runtime.imports import import_with_extra
from penstock.telemetry import log
from services.cli.arguments import sort_arguments


def replay(
    context: typer.Context,
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run folder, or a file that --export wrote.", show_default=False)
    ],
    step: Annotated[
        int | None, typer.Option("--step", help="Optimizer step; default: the only recorded one.", min=1)
    ] = None,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", help="Write the step to one file, for a bug report.")
    ] = None,
) -> int:
    """Recompute a recorded optimizer step, without engine or bus, and show it beside the run's log.

    The run needs trainer.record_groups = true. Any --section.key=value shows what the same step would have done with
    another loss, bound or optimizer. Exits with 1 if the replay differs from the run.
    """
    sources, overrides = sort_arguments(source, context.args)
    if len(sources) != 1:
        raise ConfigError(f"give one run folder or file; given: {', '.join(map(str, sources)) or 'none'}")
    log.configure(LogConfig(level="warning"), service="replay")
    replaying = import_with_extra("services.cli.replay.run", "penstock replay", extra="trainer")
    code: int = replaying.replay(sources[0], step=step, overrides=overrides, export=export)
    return code
