"""The `penstock` command: its subcommands, and its answers to mistakes.

The recipe is read and checked before any heavy import, so that a mistyped key is reported in half a second. A mistake
is reported in one line, `error: ...`, with exit code 2 and no traceback if a person can fix it.
"""

import io
import os
import sys
from collections.abc import Callable
from importlib.metadata import version as installed_version

import typer
from typer.exceptions import TyperException

from penstock.errors import PenstockError, SetupError, UserError
from penstock.runtime import process
from services.cli import bus
from services.cli.arguments import TAKES_OVERRIDES, RecipeCommand, expand_paths
from services.cli.data.command import data
from services.cli.doctor_command import doctor
from services.cli.environment.command import env
from services.cli.evaluation.command import eval_
from services.cli.init_command import init
from services.cli.plan_command import plan
from services.cli.replay.command import replay
from services.cli.replicas import command as replicas
from services.cli.runs import command as runs
from services.cli.runs.export_command import export
from services.cli.runs.scale_command import scale
from services.cli.runs.status_command import status
from services.cli.runs.view_command import view
from services.cli.score.command import score
from services.cli.serve import serve
from services.cli.sft.command import sft
from services.cli.show_config import show_config
from services.cli.slurm.command import slurm
from services.cli.slurm.node_command import slurm_node
from services.cli.train.command import train

app = typer.Typer(
    help="Fully asynchronous GRPO post-training on verifiable rewards.",
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # rich's own markup would hide the names of sections: [data]
)
_UNWRAPPED = "100000"
"""More columns than any help has."""
_COMMANDS: dict[str, Callable[..., int]] = {
    "train": train,
    "sft": sft,
    "eval": eval_,
    "serve": serve,
    "score": score,
    "replay": replay,
    "data": data,
    "env": env,
    "config": show_config,
    "doctor": doctor,
    "plan": plan,
    "slurm": slurm,
}
for _name, _command in _COMMANDS.items():
    app.command(name=_name, cls=RecipeCommand, context_settings=TAKES_OVERRIDES)(_command)
app.command(name="slurm-node", hidden=True, context_settings=TAKES_OVERRIDES)(slurm_node)
app.command()(init)
app.command()(export)
app.command()(view)
app.command()(status)
app.command()(scale)
app.add_typer(replicas.app, name="replicas")
app.add_typer(bus.app, name="bus")
app.add_typer(runs.app, name="runs")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code: 2 if a person must change something, 1 for other failures.

    A character that the locale's encoding lacks, such as a bar of a sparkline, is printed as a question mark.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # standard error escapes such characters in any case
        sys.stdout.reconfigure(errors="replace")
    if "_PENSTOCK_COMPLETE" in os.environ:
        # typer wraps helps at the terminal's width, and fish offers each line as a completion
        os.environ["TERMINAL_WIDTH"] = _UNWRAPPED
    try:
        command = typer.main.get_command(app)
        expand_paths(command)
        code = command(arguments, prog_name="penstock", standalone_mode=False)
    except TyperException as error:
        message = " ".join(error.format_message().split()).rstrip(".")
        return process.report_error(UserError(f"{message}; see `penstock --help`"))
    except PenstockError as error:
        return process.report_error(error)
    except PermissionError as error:  # also of `Path.exists`, where another user closed a folder
        if error.filename is None:
            raise
        return process.report_error(
            SetupError(f"{error.filename}: {error.strerror}; change its rights or its folder's, or name another path")
        )
    except (KeyboardInterrupt, typer.Abort):
        return process.EXIT_INTERRUPTED
    return code if isinstance(code, int) else 0


@app.command()
def version() -> int:
    """Print the version."""
    sys.stdout.write(f"{installed_version('penstock')}\n")
    return 0
