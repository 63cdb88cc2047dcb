"""`penstock runs`: lists runs in folders and on NATS, and deletes them there together."""

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from penstock import config as configuration
from penstock.bus.local_server import require_unserved_store
from penstock.config import BusConfig, LogConfig, SecurityConfig
from penstock.errors import ConfigError, PenstockError, SetupError
from penstock.runtime.security import Security
from penstock.telemetry import log
from services.cli.arguments import RecipeGroup, overrides_of
from services.cli.console import describe_age, describe_size, open_console
from services.cli.runs.deletion import deleting, newer_folders
from services.cli.runs.folders import FolderOfRun, is_run_folder, read_folder, without_bus
from services.recipe import Recipe
from services.view.run_reader import RunReader

if TYPE_CHECKING:
    from penstock.bus.connection import Bus
    from penstock.bus.stored.stored_runs import StoredRun

_HELP = """List runs, in folders and on NATS; delete runs from both.

With --url, --security.key=value says how these NATS servers are reached.
"""

app = typer.Typer(cls=RecipeGroup, help=_HELP)

ResultT = TypeVar("ResultT")

Url = Annotated[
    str, typer.Option("--url", metavar="NATS_URL", help="NATS servers, beside those that the folders' recipes name.")
]


@dataclasses.dataclass(slots=True, kw_only=True)
class _Row:
    """A run, where it is, and where it stands."""

    run: str
    folder: str = ""
    state: str = "stopped"
    step: int = 0
    num_steps: int = 0
    last_change: float | None = None
    size_bytes: int = 0
    bus_url: str = ""
    bus_bytes: int | None = None


@app.command("list")
def list_runs(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with run folders in it.")] = Path("runs"),
    url: Url = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """List runs with their state, last step, its age, and size: those in FOLDER, and those on the NATS of any of them.

    A run on NATS without a folder here is another machine's, or its folder is gone.
    """
    log.configure(LogConfig(level="error"), service="runs")
    security_of_url = _security_of(url, overrides_of(context))
    found = [_read_or_warn(path.parent) for path in sorted(folder.glob("*/config.toml"))]
    rows = [_row_of(each) for each in found]
    buses = {each.bus.url: (each.bus, each.security) for each in found if each.bus.url}
    if url and (url not in buses or security_of_url is not None):
        buses[url] = (_bus_at(url), security_of_url or SecurityConfig())
    for bus_url, (bus, security) in sorted(buses.items()):
        try:
            stored = _on_bus(_list_stored, bus, security)
        except PenstockError as error:
            sys.stderr.write(f"warning: {error}\n")
            continue
        _add_stored(rows, bus_url, stored)
    if as_json:
        sys.stdout.write(json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n")
    elif rows:
        _print(rows)
    else:
        sys.stdout.write(f"no runs in {folder}\n")
    return 0


@app.command()
def delete(
    context: typer.Context,
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders; with --url, names of runs on NATS.", show_default=False),
    ],
    url: Annotated[
        str, typer.Option("--url", metavar="NATS_URL", help="Delete what these NATS servers store of runs by name.")
    ] = "",
    keep_bus: Annotated[bool, typer.Option("--keep-bus", help="Leave what NATS stores.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> int:
    """Delete runs: their folders and weight files, and what NATS stores of them. Refuses a run that is live."""
    log.configure(LogConfig(level="error"), service="runs")
    security = _security_of(url, overrides_of(context)) or SecurityConfig()
    if url:
        if keep_bus:
            raise ConfigError(
                f"--url={url} deletes from NATS only, and --keep-bus leaves it as it is; give one of them"
            )
        for run in map(str, runs):
            _delete_stored(run, _bus_at(url), security, yes=yes)
        return 0
    for path in runs:
        if path.is_symlink() or not is_run_folder(path):
            raise SetupError(
                f"{path} is no run folder, which has a config.toml with run.name, and a lock or checkpoints; give "
                "runs/<name>-<start>, or --url to delete a run from NATS by its name"
            )
    for path in runs:
        _delete(read_folder(path), keep_bus=keep_bus, yes=yes)
    return 0


def _bus_at(url: str) -> BusConfig:
    """Return the NATS servers at `url`.

    Raises:
        ConfigError: it is not the URL of NATS servers.
    """
    return configuration.load(Recipe, (), [f"--bus.url={url}"]).bus


def _security_of(url: str, overrides: list[str]) -> SecurityConfig | None:
    """Return how the NATS servers at `url` are reached; None: nothing was said of it."""
    if others := [each for each in overrides if not each.startswith("--security.")]:
        raise ConfigError(f"{others[0]}: runs have recipes of their own; leave it out")
    if overrides and not url:
        raise ConfigError(f"{overrides[0]} says how the NATS servers of --url are reached; give --url NATS_URL")
    return configuration.load(Recipe, (), overrides).security if overrides else None


def _delete(found: FolderOfRun, *, keep_bus: bool, yes: bool) -> None:
    newer = newer_folders(found) if found.bus.url else []
    has_stored = bool(found.bus.url and found.run) and not keep_bus and not newer
    path, row = found.folder.path, _row_of(found)
    what = f"{path} ({describe_size(row.size_bytes)}, step {row.step} of {row.num_steps})"
    if found.weight_files is not None:
        what += f", its weight files in {found.weight_files}"
    if has_stored:
        what += f" and all that NATS at {found.bus.url} stores of run {found.run!r}"
    if newer and not keep_bus:
        sys.stdout.write(f"NATS keeps what it stores of run {found.run!r}: {newer[0]} is a later run of that name\n")
    _confirm(what, yes=yes)
    with deleting(found):
        asyncio.run(require_unserved_store(found.folder.nats))
        if has_stored:
            _on_bus(lambda bus: _remove_stored(bus, found.run), found.bus, found.security)
    sys.stdout.write(f"deleted {what}\n")


def _delete_stored(run: str, bus: BusConfig, security: SecurityConfig, *, yes: bool) -> None:
    stored = next((each for each in _on_bus(_list_stored, bus, security) if each.name == run), None)
    if stored is None:
        raise SetupError(f"NATS at {bus.url} stores no run {run!r}; `penstock runs list --url {bus.url}` lists them")
    what = f"all that NATS at {bus.url} stores of run {run!r} ({describe_size(stored.size_bytes)})"
    _confirm(what, yes=yes)
    _on_bus(lambda opened: _remove_stored(opened, run), bus, security)
    sys.stdout.write(f"deleted {what}\n")


def _confirm(what: str, *, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"nobody can be asked whether to delete {what}; give --yes")
    typer.confirm(f"delete {what}?", abort=True)


def _on_bus(ask: "Callable[[Bus], Awaitable[ResultT]]", config: BusConfig, security: SecurityConfig) -> ResultT:
    from penstock.bus.connection import connect  # imports NATS, so only after the arguments are checked

    async def asking() -> ResultT:
        async with connect(config, run="", security=Security.load(security)) as bus:
            return await ask(bus)

    return asyncio.run(asking())


async def _list_stored(bus: "Bus") -> "list[StoredRun]":
    from penstock.bus.stored.stored_runs import list_stored_runs

    return await list_stored_runs(bus)


async def _remove_stored(bus: "Bus", run: str) -> None:
    from penstock.bus.stored.stored_runs import delete_stored_run

    await delete_stored_run(bus, run)


def _read_or_warn(path: Path) -> FolderOfRun:
    try:
        return read_folder(path)
    except ConfigError as error:
        sys.stderr.write(f"warning: {error}\n")
        return without_bus(path)


def _row_of(found: FolderOfRun) -> _Row:
    run = RunReader(found.folder.path, keep={"step", "num_steps"}.__contains__)
    _, steps = run.steps()
    last: dict[str, Any] = steps[-1] if steps else {}
    step, num_steps = last.get("step", 0), last.get("num_steps", 0)
    is_finished = bool(num_steps) and step >= num_steps
    return _Row(
        run=found.run,
        folder=str(found.folder.path),
        state="running" if run.is_running else "finished" if is_finished else "stopped",
        step=step,
        num_steps=num_steps,
        last_change=run.last_change,
        size_bytes=found.size_bytes,
        bus_url=found.bus.url,
    )


def _add_stored(rows: list[_Row], bus_url: str, stored: "Sequence[StoredRun]") -> None:
    """Add what NATS stores: to the newest folder of a run, or as a row of its own."""
    for each in stored:
        own = [row for row in rows if (row.run, row.bus_url) == (each.name, bus_url) and row.folder]
        if own:
            row = max(own, key=lambda row: row.last_change or 0.0)
        else:
            row = _Row(run=each.name, bus_url=bus_url)
            rows.append(row)
        row.bus_bytes = each.size_bytes
        if each.is_running:
            row.state = "running"


def _print(rows: Sequence[_Row]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("run", "folder", "state", "step", "last", "size", "on NATS", box=None)
    for row in rows:
        age = "" if row.last_change is None else f"{describe_age(max(0.0, time.time() - row.last_change))} ago"
        stored = "" if row.bus_bytes is None else f"{describe_size(row.bus_bytes)} at {row.bus_url}"
        step = f"{row.step} of {row.num_steps}" if row.num_steps else "-"
        table.add_row(
            row.run,
            Text(row.folder or "-"),
            row.state,
            step,
            age,
            describe_size(row.size_bytes) if row.folder else "",
            Text(stored),
        )
    open_console().print(table)
