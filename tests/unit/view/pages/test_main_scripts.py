"""Which page an address shows, and when it is drawn again."""

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from services.trainer.telemetry.episodes.files import EpisodeFiles
from services.view.app import view_app
from services.view.run_reader import RunReader
from tests.support.view_runs import add_group, make_run, step_row, write_rows
from tests.support.view_scripts import WINDOW, ViewScripts


class Server:
    """Answers as `penstock view` does, or not at all."""

    def __init__(self, runs: list[Path]) -> None:
        self.is_away = False
        self.failing = "nothing"
        """Part of the paths that it fails to answer."""
        self.paths: list[str] = []
        self.show(runs)

    def show(self, runs: list[Path]) -> None:
        """Show these runs."""
        self._client = TestClient(view_app([RunReader(folder) for folder in runs]))

    def answer(self, path: str) -> tuple[int, str]:
        """Return status and JSON of an answer."""
        self.paths.append(path)
        if self.is_away:
            return 0, ""
        if self.failing in path:
            return 503, json.dumps({"error": {"message": "it fails"}})
        answer = self._client.get(path)
        return answer.status_code, answer.text


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs."""
    return [make_run(tmp_path / name, num_steps=2) for name in ("first", "second")]


@pytest.fixture
def server(runs: list[Path]) -> Server:
    """A server that shows them."""
    return Server(runs)


@pytest.fixture
def window(server: Server) -> ViewScripts:
    """A window in which no page has been opened."""
    scripts = ViewScripts(answer=server.answer)
    scripts.evaluate(WINDOW)
    return scripts


_SHOWN = """
    const current = document.getElementById("nav").childNodes.find((link) => link["aria-current"]);
    return [document.title, current?.textContent, document.getElementById("run").value];
"""


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("#settings", ["Settings · first", "Settings", 0]),
        ("#settings?run=1", ["Settings · second", "Settings", 1]),
        ("#settings?run=9", ["Settings · second", "Settings", 1]),
        ("#settings?run=-1", ["Settings · first", "Settings", 0]),
        ("#settings?run=0.5", ["Settings · first", "Settings", 0]),
        ("#settings?run=x&text=num", ["Settings · first", "Settings", 0]),
        ("#group?run=1&n=1", ["Group · second", "Samples", 1]),
    ],
)
def test_an_address_chooses_page_and_run(window: ViewScripts, address: str, shown: list[Any]) -> None:
    """A run that is not there is another one; a group is one of the samples."""
    assert window.run(f"await open('{address}'); {_SHOWN}") == shown


def test_a_page_that_is_not_there_is_named(window: ViewScripts) -> None:
    """And the next address is followed."""
    assert window.run("await open('#nowhere?run=1'); return page();") == "There is no page nowhere."
    assert window.run("await go('#alarms'); return page();").startswith("Alarms")


def test_links_keep_the_run_and_fields_keep_the_page(window: ViewScripts) -> None:
    """Links of the list of pages lead to the same run; a field that is emptied is not in the address."""
    window.run("await open('#settings?run=1&text=num&all=1')")
    links = window.run("return document.getElementById('nav').childNodes.map((link) => link.href);")
    assert [*links[:2], links[-1]] == ["#curves?run=1", "#samples?run=1", "#alarms?run=1"]
    go = """
        const tools = document.getElementById("page").childNodes[1];
        const search = tools.childNodes[0];
        search.value = TEXT;
        search.listeners.change();
        return location.hash;
    """
    assert window.run(go.replace("TEXT", "'a & b'")) == "#settings?run=1&text=a%20%26%20b&all=1"
    assert window.run(go.replace("TEXT", "''")) == "#settings?run=1&all=1"


def test_a_live_page_is_drawn_for_steps_and_for_its_own_news(window: ViewScripts, runs: list[Path]) -> None:
    """One that is not shows the steps in its head only; without news none is drawn."""
    files = EpisodeFiles(runs[0] / "episodes", last_step=9, max_bytes=1e9)
    assert "2 of 2 kept groups" in window.run("await open('#samples'); return page();")
    passed = """
        const before = document.getElementById("page").childNodes;
        await pass();
        return [document.getElementById("page").childNodes !== before, page(), status()];
    """
    is_drawn, _, shown = window.run(passed)
    assert (is_drawn, shown) == (False, "not running · step 2 of 200")
    add_group(files, step=2, index=9)
    is_drawn, text, _ = window.run(passed)
    assert (is_drawn, "3 of 3 kept groups" in text) == (True, True)
    write_rows(runs[0], [step_row(3)])
    is_drawn, _, shown = window.run(passed)
    assert (is_drawn, shown) == (True, "not running · step 3 of 200")
    window.run("await go('#settings')")
    write_rows(runs[0], [step_row(4)])
    is_drawn, _, shown = window.run(passed)
    assert (is_drawn, shown) == (False, "not running · step 4 of 200")


@pytest.mark.parametrize(
    "begin",
    [
        "getSelection = () => ({ isCollapsed: false, containsNode: () => true })",
        "tell('pointerdown'); document.querySelector = () => ({})",
        "tell('keydown'); document.querySelector = () => ({})",
    ],
    ids=["marked text", "pressed field", "typed field"],
)
def test_a_page_that_is_used_waits(window: ViewScripts, runs: list[Path], begin: str) -> None:
    """Until the mark or the focus is gone. A focus alone, which a page that opens has, is no use."""
    files = EpisodeFiles(runs[0] / "episodes", last_step=9, max_bytes=1e9)
    newest = "await pass(); return page().match(/step (\\d+)/)[1];"
    window.run("await open('#samples')")
    window.run("globalThis.tell = (kind) => document.getElementById('page').listeners[kind]();")
    window.run(begin)
    add_group(files, step=7, index=9)
    assert window.run(newest) == "2"
    window.run("getSelection = () => ({ isCollapsed: true }); document.querySelector = () => null;")
    assert window.run(newest) == "7"
    window.run("document.querySelector = () => ({});")
    add_group(files, step=8, index=10)
    assert window.run(newest) == "8"


def test_a_server_that_is_away_is_asked_again(window: ViewScripts, server: Server) -> None:
    """At the start and later; what is shown stays, and the head says that no answer came."""
    server.is_away = True
    assert window.run("await open('#samples'); return page();") == "Failed to fetch"
    server.is_away = False
    assert "kept groups" in window.run("await pass(); return page();")
    server.is_away = True
    text, shown = window.run("await pass(); return [page(), status()];")
    assert "kept groups" in text
    assert shown == "no answer: Failed to fetch"
    server.is_away = False
    assert window.run("await pass(); return status();") == "not running · step 2 of 200"


def test_a_page_that_failed_is_drawn_again_unless_that_is_final(window: ViewScripts, server: Server) -> None:
    """Also one that is not live. A group that is not there does not come."""
    server.failing = "/settings"
    assert window.run("await open('#settings'); return page();") == "it fails"
    server.failing = "nothing"
    assert window.run("await pass(); return page();").startswith("Settings")
    assert "has no group number 99" in window.run("await go('#group?run=0&n=99'); return page();")
    server.paths.clear()
    window.run("await pass()")
    assert server.paths[0] == "api/runs"
    assert not any("episodes" in path for path in server.paths)


def test_another_server_s_runs_are_opened_anew(
    window: ViewScripts, server: Server, runs: list[Path], tmp_path: Path
) -> None:
    """At the same address somebody may show other runs later; their numbers mean nothing here."""
    window.run("await open('#samples')")
    server.show([runs[0], make_run(tmp_path / "third", num_steps=1)])
    assert window.run("await pass(); return [location.numReloads, timers.length];") == [1, 0]
