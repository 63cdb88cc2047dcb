"""`penstock scale`: changes how many engines and workers a run has."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.errors import SetupError
from services.launch.run_folder import RunFolder

_TIMEOUT_S = 30.0


def scale(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a running run.", show_default=False)],
    counts: Annotated[
        list[str],
        typer.Argument(
            metavar="KIND=N...",
            help="Processes that the run shall have: rollout=6, prefill=1, decode=2, worker=2.",
            show_default=False,
        ),
    ],
) -> int:
    """Change how many engines and workers a run has while it trains; nothing is lost.

    Engines that leave finish or hand over their calls first. `--resume` begins with the recipe's numbers again.
    """
    from services.launch.scaling.fleet import parse_counts
    from services.launch.scaling.request import ask

    if not (folder / "config.toml").is_file():
        raise SetupError(f"{folder} holds no run; give a run folder, runs/<name>-<start>")
    for line in ask(RunFolder(folder), parse_counts(counts), timeout_s=_TIMEOUT_S):
        sys.stdout.write(f"{line}\n")
    return 0
