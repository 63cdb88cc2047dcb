"""The HTTP application: the pages' files, and the runs' data as JSON."""

import math
import mimetypes
import secrets
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import Response

from penstock.http.app import make_app
from services.view.episode_query import EpisodeQuery
from services.view.run_reader import NotThereError, RunReader, without_groups
from services.view.summary import alarms_of, describe_run, fleet_now
from services.view.timeline import timeline_of

_STATIC: Final = Path(__file__).with_name("static")
_PAGES: Final = {
    str(path.relative_to(_STATIC)): path for path in _STATIC.rglob("*") if path.is_file() and path.suffix != ".LICENSE"
}
_HEADERS: Final = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""What a policy writes may be anything, so no page may run or load anything but its own files."""
_KEPT: Final = {"Cache-Control": "private, max-age=31536000, immutable", "X-Content-Type-Options": "nosniff"}
_MOST_LISTED: Final = 500
_MOST_STEPS: Final = 5000
"""Steps in one answer, about 25 MB: a browser reads an answer into one string, which has 512 MB at most."""


def view_app(runs: Sequence[RunReader]) -> FastAPI:
    """Return the application that shows `runs`, known by their place in the list."""
    app = make_app(title="penstock view", description="Runs of Penstock.", version=version("penstock"))
    boot = secrets.token_hex(4)  # a page may stay open while another server takes this one's place

    def run_of(number: int) -> RunReader:
        if not 0 <= number < len(runs):
            raise HTTPException(404, f"there is no run number {number}; {len(runs)} are shown")
        return runs[number]

    @app.get("/healthz")
    def health() -> Response:
        return _json({"status": "serving"})

    @app.get("/api/runs")
    def list_runs() -> Response:
        return _json([describe_run(number, run) for number, run in enumerate(runs)])

    @app.get("/api/runs/{number}/steps")
    def steps(number: int, after: int = 0, generation: str = "") -> Response:
        file_generation, rows = run_of(number).steps()
        now = f"{boot}-{file_generation}"
        start = after if generation == now else 0
        sent = [without_groups(row) for row in rows[start : start + _MOST_STEPS]]
        return _json({"generation": now, "num_rows": len(rows), "start": start, "rows": sent})

    @app.get("/api/runs/{number}/evaluations")
    def evaluations(number: int) -> Response:
        return _json(run_of(number).evaluations())

    @app.get("/api/runs/{number}/settings")
    def settings(number: int) -> Response:
        return _json(run_of(number).settings())

    @app.get("/api/runs/{number}/alarms")
    def alarms(number: int) -> Response:
        return _json(alarms_of(run_of(number)))

    @app.get("/api/runs/{number}/fleet")
    def fleet(number: int) -> Response:
        return _json(fleet_now(run_of(number)))

    @app.get("/api/runs/{number}/episodes")
    def episodes(
        number: int,
        outcome: str = "",
        step: int | None = None,
        row: str = "",
        finish: str = "",
        text: str = "",
        sort: str = "step",
        descending: bool = True,
        start: int = 0,
        limit: int = 100,
    ) -> Response:
        query = EpisodeQuery(
            outcome=outcome, step=step, row=row, finish=finish, text=text, sort=sort, descending=descending
        )
        index, found = run_of(number).find_episodes(query)
        shown = found.places[max(0, start) :][: max(0, min(limit, _MOST_LISTED))]
        return _json(
            {
                "num_kept": len(index),
                "num_found": len(found.places),
                "num_unsearched": found.num_unsearched,
                "found": [index[place] for place in shown],
            }
        )

    @app.get("/api/runs/{number}/episodes/{group}")
    def episode(number: int, group: int) -> Response:
        try:
            return Response(run_of(number).episode(group), media_type="application/json", headers=_HEADERS)
        except NotThereError as error:
            raise HTTPException(404, str(error)) from None

    @app.get("/api/runs/{number}/spans")
    def spans(number: int, first_step: int = 0, last_step: int = 2**31) -> Response:
        index = run_of(number).episodes()
        keys = ("number", "step", "index", "outcome", "rewards", "spans", "versions")
        return _json([{key: entry[key] for key in keys} for entry in index if first_step <= entry["step"] <= last_step])

    @app.get("/api/runs/{number}/trace")
    def trace(number: int, first_step: int = 0, last_step: int = 2**31) -> Response:
        return _json([step for step in run_of(number).trace() if first_step <= step["step"] <= last_step])

    @app.get("/api/runs/{number}/processes")
    def processes(number: int, first: float, last: float | None = None) -> Response:
        run = run_of(number)
        spans = run.spans(first, math.inf if last is None else last)
        return _json({**timeline_of(spans, run.episodes()), "losses": spans.losses()})

    @app.get("/api/runs/{number}/images/{name}")
    def image(number: int, name: str) -> Response:
        try:
            data = run_of(number).image(name)
        except NotThereError as error:
            raise HTTPException(404, str(error)) from None
        return Response(data, media_type=_type_of(name), headers=_KEPT)

    @app.get("/{path:path}")
    def page(path: str) -> Response:
        file = _PAGES.get(path or "index.html")
        if file is None:
            raise HTTPException(404, f"there is no page {path!r}")
        return Response(file.read_bytes(), media_type=_type_of(file.name), headers=_HEADERS)

    return app


def _type_of(name: str) -> str:
    if name.endswith((".js", ".mjs")):
        return "text/javascript"
    return mimetypes.guess_type(name)[0] or "application/octet-stream"


def _json(value: Any) -> Response:
    """Answer with JSON; numbers that are not finite become null."""
    return Response(msgspec.json.encode(value), media_type="application/json", headers=_HEADERS)
