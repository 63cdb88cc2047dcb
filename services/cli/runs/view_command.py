"""`penstock view`: shows runs in a browser."""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from penstock.config import LogConfig
from penstock.errors import ConfigError, SetupError
from penstock.runtime import process
from penstock.runtime.imports import import_with_extra
from penstock.runtime.security import TOKEN, Security
from penstock.telemetry import log
from services.cli.output_file import output_file

_GRACE_S = 2.0
_SHOWING: Final = ("services.view.app", "services.view.sign_in", "penstock.http.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Where runs are shown."""

    address: str
    """For a person; it has the token, or the name of the variable that holds it."""
    address_once: str
    """For a program that opens a browser: the first one that asks for it is let in."""


def view(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders, or a folder with run folders in it.", show_default=False),
    ],
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0: all of this machine.")
    ] = "127.0.0.1",
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            help="Write what every process did when to this file, for ui.perfetto.dev or chrome://tracing, and end.",
            show_default=False,
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export",
            metavar="FILE.html",
            help="Write the pages and the runs' data into one file that needs no server, and end.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int, typer.Option("--port", help="Port to listen on; 0 takes any free one.", min=0, max=65535)
    ] = 7090,
) -> int:
    """Show runs in a browser: curves, samples token by token, timeline, staleness, fleet, evaluation, settings, alarms.

    Works while a run goes on, and writes nothing. Prints the address to open. Whoever opens it needs the token in it:
    PENSTOCK_TOKEN if that is set, otherwise a new one.
    """
    log.configure(LogConfig(level="warning"), service="view")
    if trace is not None and export is not None:
        raise ConfigError(f"--trace={trace} and --export={export} each write one file and end; give one of them")
    runs = find_runs(folders)
    if trace is not None:
        return _write_trace(runs, trace)
    if export is not None:
        return _write_page(runs, export)
    showing = prepare(runs, command="penstock view", host=host, port=port)

    async def serve(stop: asyncio.Event) -> None:
        async with showing as shown:
            number = f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}"
            sys.stdout.write(f"{number} at {shown.address}\nCtrl-C ends it\n")
            sys.stdout.flush()
            await stop.wait()

    return process.run(serve)


def require_packages(*, command: str) -> None:
    """Check that what `prepare` imports is there.

    Raises:
        SetupError: a package is missing for `command`.
    """
    for module in _SHOWING:
        import_with_extra(module, command, extra="view")


def prepare(
    folders: list[Path], *, command: str, host: str = "127.0.0.1", port: int = 0
) -> AbstractAsyncContextManager[Shown]:
    """Return what shows these runs while it is entered, and yields where.

    Raises:
        SetupError: a package is missing for `command`; on entering it, the port is in use.
    """
    app, sign_in, http = (import_with_extra(module, command, extra="view") for module in _SHOWING)
    security = Security.from_environment()
    is_own = not security.token
    if is_own:
        security = Security(token=secrets.token_urlsafe(24))
    runs = [app.RunReader(folder) for folder in folders]

    @asynccontextmanager
    async def showing() -> AsyncIterator[Shown]:
        key = secrets.token_urlsafe(24)
        wrap = partial(sign_in.SignIn, token=security.token, key=key)
        server = http.HttpServer(app.view_app(runs), host=host, port=port, key="--port", security=security, wrap=wrap)
        await server.start()
        try:
            yield Shown(
                address=f"{server.url}/?token={security.token if is_own else f'<{TOKEN}>'}",
                address_once=f"{server.url}/?key={key}",
            )
        finally:
            await server.drain(_GRACE_S)

    return showing()


def _write_trace(folders: list[Path], file: Path) -> int:
    """Write the spans of a run to `file`, in the Trace Event Format.

    Raises:
        SetupError: there are several runs, the run has no spans, or the file cannot be written.
    """
    from services.view.trace_events import write_trace_events
    from services.view.trace_reader import TraceReader

    if len(folders) > 1:
        raise SetupError(f"--trace writes one run, and {len(folders)} are given; name one run folder")
    trace = TraceReader(folders[0]).read()
    if not trace.spans:
        raise SetupError(f"{folders[0]} has no spans; see trace.max_gib")
    try:
        with output_file(file) as out:
            num_events = write_trace_events(trace.spans, out)
    except OSError as error:
        raise SetupError(f"--trace={file}: {error.strerror}; give a file that can be written") from None
    lost = f"; {trace.num_dropped} spans were dropped" if trace.num_dropped else ""
    lost += f"; {trace.num_lost_batches} batches of spans are missing" if trace.num_lost_batches else ""
    sys.stdout.write(f"{num_events} events in {file}{lost}; open it in ui.perfetto.dev\n")
    return 0


def _write_page(folders: list[Path], file: Path) -> int:
    """Write runs to `file`, as one HTML page.

    Raises:
        SetupError: the file cannot be written.
    """
    from services.view.export.page import export_runs
    from services.view.run_reader import RunReader

    found = export_runs([RunReader(folder) for folder in folders])
    try:
        with output_file(file) as out:
            out.write(found.page)
    except OSError as error:
        raise SetupError(f"--export={file}: {error.strerror}; give a file that can be written") from None
    number = f"{len(folders)} {'run' if len(folders) == 1 else 'runs'}"
    sys.stdout.write(f"{number} in {file}, {len(found.page) / 2**20:.1f} MiB\n")
    sys.stdout.writelines(f"left out of {each}\n" for each in found.left_out)
    return 0


def find_runs(folders: list[Path]) -> list[Path]:
    """Return the run folders among `folders`, and those directly in the others, the newest first.

    Raises:
        SetupError: a folder neither is one nor has one in it.
    """
    found: list[Path] = []
    for folder in folders:
        inside = [path.parent for path in folder.glob("*/config.toml")]
        if (folder / "config.toml").is_file():
            found.append(folder)
        elif inside:
            found += sorted(inside, key=lambda path: path.stat().st_mtime, reverse=True)
        else:
            raise SetupError(f"{folder} holds no run; give a run folder, runs/<name>-<start>, or a folder of such")
    return list(dict.fromkeys(found))
