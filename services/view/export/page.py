"""Writes runs into one HTML file that needs no server and no network, for an issue or a paper.

The pages' own files are in it: the styles, the scripts as an import map of data URLs, and the runs' data as JSON, which
`static/exported.js` gives to the pages instead of a server's answers. So an exported run is read as a live one is.
"""

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from services.view.export.excerpt import Excerpt, excerpt_of
from services.view.run_reader import RunReader

MAX_BYTES: Final = 16 * 2**20
"""Size of the runs' data in one file: below what trackers of issues take, and quickly opened on a phone."""
_STATIC: Final = Path(__file__).parents[1] / "static"
_IMPORT: Final = re.compile(r'(\bfrom\s*|\bimport\s*)"(\.{1,2}/[^"]+)"')
_STYLE: Final = re.compile(r'<link rel="stylesheet" href="([^"]+)">')
_SCRIPT: Final = '<script type="module" src="main.js"></script>'
_POLICY: Final = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:"
"""Nothing may be fetched, whatever a policy wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A file with runs."""

    page: bytes
    left_out: list[str]
    """What it lacks, for people, each with the run's name."""


def export_runs(runs: Sequence[RunReader], *, max_bytes: int = MAX_BYTES) -> Exported:
    """Return a page with `runs`, each with at most its share of about `max_bytes` of data."""
    excerpts = [excerpt_of(number, run, max_bytes=max_bytes // len(runs)) for number, run in enumerate(runs)]
    now = datetime.now(UTC).isoformat(timespec="minutes")
    names = ", ".join(run.name for run in runs)
    return Exported(
        page=_page(title=f"Penstock: {names}", exported=now, excerpts=excerpts),
        left_out=[f"{run.name}: {each}" for run, found in zip(runs, excerpts, strict=True) for each in found.left_out],
    )


def _page(*, title: str, exported: str, excerpts: Sequence[Excerpt]) -> bytes:
    page = (_STATIC / "index.html").read_text()
    page = _STYLE.sub(lambda found: f"<style>{(_STATIC / found[1]).read_text()}</style>", page)
    page = page.replace("<title>Penstock</title>", f"<title>{html.escape(title)}</title>")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    page = page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n    {policy}')
    scripts = [
        _embedded("importmap", {"imports": _modules()}),
        _embedded(
            "application/json",
            {"exported": exported, "runs": [{**each.data, "left_out": each.left_out} for each in excerpts]},
            name="exported",
        ),
        '<script type="module">import "penstock/main.js";</script>',
    ]
    before, script, after = page.partition(_SCRIPT)
    assert script, "index.html starts main.js"
    return b"".join([before.encode(), "\n    ".join(scripts).encode(), after.encode()])


def _embedded(kind: str, value: Mapping[str, Any], *, name: str = "") -> str:
    """Return a script element with JSON; no text in it can end the element."""
    text = msgspec.json.encode(value).decode().replace("<", "\\u003c")
    identity = f' id="{name}"' if name else ""
    return f'<script type="{kind}"{identity}>{text}</script>'


def _modules() -> dict[str, str]:
    """Return all scripts by the names under which they import each other: data URLs have no folder."""
    modules = {}
    for path in sorted([*_STATIC.rglob("*.js"), *_STATIC.rglob("*.mjs")]):

        def renamed(found: re.Match[str], folder: Path = path.parent) -> str:
            imported = (folder / found[2]).resolve().relative_to(_STATIC.resolve())
            return f'{found[1]}"{_name_of(imported)}"'

        source = _IMPORT.sub(renamed, path.read_text())
        modules[_name_of(path.relative_to(_STATIC))] = (
            "data:text/javascript;base64," + base64.b64encode(source.encode()).decode()
        )
    return modules


def _name_of(path: Path) -> str:
    return f"penstock/{path.as_posix()}"
