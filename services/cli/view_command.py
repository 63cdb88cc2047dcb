"""`penstock view`: shows runs in a browser."""

import asyncio
import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.config import LogConfig
from penstock.errors import SetupError
from penstock.runtime import process
from penstock.runtime.security import TOKEN, Security
from penstock.telemetry import log
from services.cli.extras import import_with_extra

_GRACE_S = 2.0


def view(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders, or a folder with run folders in it.", show_default=False),
    ],
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0: all of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 takes any free one.", min=0)] = 7090,
) -> int:
    """Show runs in a browser: curves, samples token by token, timeline, staleness, evaluation, settings, alarms.

    Works while a run goes on, and writes nothing. Prints the address to open. Whoever opens it needs the token in it:
    PENSTOCK_TOKEN if that is set, otherwise a new one.
    """
    log.configure(LogConfig(level="warning"), service="view")
    app = import_with_extra("services.view.app", "penstock view", extra="view")
    runs = [app.RunReader(folder) for folder in find_runs(folders)]
    sign_in = import_with_extra("services.view.sign_in", "penstock view", extra="view")
    http = import_with_extra("penstock.http.server", "penstock view", extra="view")
    security = Security.from_environment()
    is_own = not security.token
    if is_own:
        security = Security(token=secrets.token_urlsafe(24))
    server = http.HttpServer(
        app.view_app(runs), host=host, port=port, key="--port", security=security, wrap=sign_in.SignIn
    )

    async def serve(stop: asyncio.Event) -> None:
        await server.start()
        query = f"/?token={security.token}" if is_own else f"/?token=<{TOKEN}>"
        sys.stdout.write(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} at {server.url}{query}\nCtrl-C ends it\n")
        sys.stdout.flush()
        await stop.wait()
        await server.drain(_GRACE_S)

    return process.run(serve)


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
