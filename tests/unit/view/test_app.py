"""The pages' data over HTTP, as a browser asks for it."""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.http.server import HttpServer
from penstock.runtime.security import Security
from services.trainer.telemetry.episodes.files import EpisodeFiles
from services.view.app import view_app
from services.view.run_reader import RunReader
from services.view.sign_in import SignIn
from tests.support.view_runs import SHA, add_group, add_spans, make_run, step_row, write_rows
from tests.support.waiting import HANG_S

_STATIC = Path(__file__).parents[3] / "services" / "view" / "static"
_VENDORED = {
    "uPlot.mjs": "5dd9b3281aa64b461b42d9945f6adb2649d346502b12281a9ae0d46599a80eba",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs."""
    return [make_run(tmp_path / "first"), make_run(tmp_path / "second", num_steps=3, max_staleness=2)]


@pytest.fixture
async def url(runs: list[Path]) -> AsyncIterator[str]:
    """Address of a server that shows them, which asks for a token."""
    app = view_app([RunReader(folder) for folder in runs])
    server = HttpServer(app, host="127.0.0.1", port=0, security=Security(token="secret"), wrap=SignIn)
    await server.start()
    yield server.url
    await server.drain(1.0)


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A browser that has opened the address with the token."""
    async with httpx.AsyncClient(base_url=url, follow_redirects=True, timeout=HANG_S) as client:
        assert (await client.get("/", params={"token": "secret"})).status_code == 200
        yield client


async def test_the_token_in_the_address_becomes_a_cookie(url: str) -> None:
    """It does not stay in the address, and scripts cannot read it; without it there is nothing.

    Whoever is signed in may follow a link to a page that stands elsewhere, so the browser must send it there too.
    """
    async with httpx.AsyncClient(base_url=url, timeout=HANG_S) as client:
        for path in ("/", "/main.js", "/api/runs", "/api/runs/0/episodes/0"):
            assert (await client.get(path)).status_code == 401
        answer = await client.get("/", params={"run": "1", "token": "secret"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/?run=1")
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=lax" in cookie
        assert (await client.get("/api/runs")).status_code == 200
    async with httpx.AsyncClient(base_url=url, follow_redirects=True, timeout=HANG_S) as client:
        assert (await client.get("/", params={"token": "wrong"})).status_code == 401


@pytest.mark.parametrize("theirs", ['prefs={"theme":"dark"}', "last seen=1", "v=a b c", "path", "=x"])
async def test_cookies_of_other_programs_lock_nobody_out(theirs: str) -> None:
    """A browser sends a host's cookies to all of its ports. A token is read as it was written, quoted where it must."""
    seen: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(value for key, value in scope["headers"] if key == b"authorization")
        await Response()(scope, receive, send)

    token = 'a"b; c\\d,é'
    transport = httpx.ASGITransport(SignIn(app, token=token))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7090") as client:
        answer = await client.get(f"/?token={quote(token)}")
        ours = answer.headers["set-cookie"].partition("; HttpOnly")[0]
        client.cookies.clear()
        for cookies in (f"{theirs}; {ours}", f"{ours}; {theirs}"):
            await client.get("/", headers={"cookie": cookies})
    assert seen == [f"Bearer {token}".encode("latin-1")] * 2


async def test_servers_behind_forwarded_ports_do_not_sign_each_other_out() -> None:
    """`ssh -L 7091:127.0.0.1:7090` leads to a server with another port; that counts where an address has none."""
    seen: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(value for key, value in scope["headers"] if key == b"authorization")
        await Response()(scope, receive, send)

    transport = httpx.ASGITransport(SignIn(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7090") as client:
        hosts = {"localhost:7091": "one", "[::1]:7092": "two", "runs.example": "three"}
        for host, token in hosts.items():
            await client.get(f"/?token={token}", headers={"host": host})
        for host in hosts:
            await client.get("/", headers={"host": host})
    assert seen == [b"Bearer one", b"Bearer two", b"Bearer three"]


@pytest.mark.parametrize("name", ["token", "key"])
async def test_a_plus_of_the_token_is_a_plus(name: str) -> None:
    """Tokens are often base64, and people put them into the address as they are. The rest of it stays as it is."""
    kept: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        kept.extend(value.decode() for key, value in scope["headers"] if key == b"authorization")
        await Response()(scope, receive, send)

    transport = httpx.ASGITransport(SignIn(app, token="a+b/c==", key="a+b/c=="))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7090") as client:
        answer = await client.get(f"/?text=x+y&{name}=a+b/c==&run=1")
        assert answer.headers["location"] == "/?text=x+y&run=1"
        await client.get("/")
    assert kept == ["Bearer a+b/c=="]


async def test_a_token_that_no_header_can_carry_is_a_wrong_one(url: str) -> None:
    """As any other that is not the server's."""
    async with httpx.AsyncClient(base_url=url, follow_redirects=True, timeout=HANG_S) as client:
        assert (await client.get("/", params={"token": "鍵"})).status_code == 401


async def test_the_token_leads_to_no_other_host(url: str) -> None:
    """Two slashes, or a backslash, would begin its name."""
    async with httpx.AsyncClient(timeout=HANG_S) as client:
        for path in ("//evil.example/x", "/\\evil.example/x", "///evil.example"):
            answer = await client.get(f"{url.rstrip('/')}{path}", params={"token": "any"})
            assert answer.status_code == 303
            assert re.match(r"/[^/\\]", answer.headers["location"])


async def test_runs_are_listed_with_where_they_stand(client: httpx.AsyncClient) -> None:
    """And with how much is wrong."""
    first, second = (await client.get("/api/runs")).json()
    assert (first["name"], first["step"], first["num_steps"], first["is_running"]) == ("first", 30, 200, False)
    assert (second["name"], second["step"], second["num_alarms"]) == ("second", 3, 0)


async def test_the_list_of_runs_tells_an_open_page_what_is_new(client: httpx.AsyncClient, runs: list[Path]) -> None:
    """An alarm, an evaluation and a kept group may come without a step, also after the last one."""

    async def listed() -> tuple[list[str], int, int]:
        run = (await client.get("/api/runs")).json()[0]
        return run["alarm_kinds"], run["num_evaluations"], run["kept_bytes"]

    kinds, num_evaluations, kept_bytes = await listed()
    assert (kinds, num_evaluations) == ([], 1)
    files = EpisodeFiles(runs[0] / "episodes", last_step=99, max_bytes=1e9)
    add_group(files, step=31, index=1, outcome="failed")
    with (runs[0] / "evaluations.jsonl").open("a") as file:
        file.write(json.dumps({"step": 30, "sets": {}}) + "\n")
    for name in ("metrics.jsonl", "evaluations.jsonl", "config.toml"):
        os.utime(runs[0] / name, (1_700_000_000, 1_700_000_000))
    with (runs[0] / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as the launcher of a run that goes on
        found = await listed()
    assert found[:2] == (["stuck"], 2)
    assert found[2] > kept_bytes


async def test_only_new_steps_are_sent(client: httpx.AsyncClient, runs: list[Path]) -> None:
    """All of them again if earlier ones were replaced."""
    found = (await client.get("/api/runs/0/steps")).json()
    assert (len(found["rows"]), found["start"]) == (30, 0)
    assert "groups" not in found["rows"][0]
    write_rows(runs[0], [step_row(31, loss=float("nan"))])
    asked = {"after": 30, "generation": found["generation"]}
    new = (await client.get("/api/runs/0/steps", params=asked)).json()
    assert [(row["step"], row["loss"]) for row in new["rows"]] == [(31, None)]
    replaced = runs[0] / "new"
    replaced.write_text(json.dumps(step_row(1)) + "\n")
    replaced.replace(runs[0] / "metrics.jsonl")
    again = (await client.get("/api/runs/0/steps", params=asked)).json()
    assert (again["start"], [row["step"] for row in again["rows"]]) == (0, [1])
    assert again["generation"] != found["generation"]


async def test_the_steps_of_a_long_run_are_sent_in_parts(client: httpx.AsyncClient, runs: list[Path]) -> None:
    """Each says how many steps there are: all of 100,000 would be half a gigabyte, which no browser reads at once."""
    write_rows(runs[0], [step_row(step) for step in range(31, 7001)])
    first = (await client.get("/api/runs/0/steps")).json()
    asked = {"after": 5000, "generation": first["generation"]}
    second = (await client.get("/api/runs/0/steps", params=asked)).json()
    parts = [(part["num_rows"], part["start"], [row["step"] for row in part["rows"]]) for part in (first, second)]
    assert parts == [(7000, 0, [*range(1, 5001)]), (7000, 5000, [*range(5001, 7001)])]


async def test_a_new_server_does_not_go_on_with_the_steps_of_another(runs: list[Path]) -> None:
    """A page that stays open while `penstock view` is started again for another run would show a mixture."""
    write_rows(runs[1], [step_row(step) for step in range(4, 41)])
    asked: dict[str, Any] = {}
    for folder, num_steps in zip(runs, (30, 40), strict=True):
        transport = httpx.ASGITransport(view_app([RunReader(folder)]))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7090") as client:
            found = (await client.get("/api/runs/0/steps", params=asked)).json()
        assert (found["start"], len(found["rows"])) == (0, num_steps)
        asked = {"after": 30, "generation": found["generation"]}


async def test_groups_are_listed_and_read(client: httpx.AsyncClient) -> None:
    """The worst group of a step with its picture is three requests away."""
    listed = (await client.get("/api/runs/0/episodes", params={"sort": "dlogp", "limit": 2})).json()
    assert (listed["num_kept"], listed["num_found"], len(listed["found"])) == (30, 30, 2)
    place = listed["found"][0]["number"]
    assert place == 29
    whole = (await client.get(f"/api/runs/0/episodes/{place}")).json()
    assert whole["step"] == 30
    picture = await client.get(f"/api/runs/0/images/{whole['images'][0]}")
    assert picture.headers["content-type"] == "image/png"
    spans = (await client.get("/api/runs/0/spans", params={"first_step": 29})).json()
    assert [each["step"] for each in spans] == [29, 30]
    trace = (await client.get("/api/runs/0/trace", params={"first_step": 29})).json()
    assert [each["step"] for each in trace] == [29, 30]
    assert (await client.get("/api/runs/1/settings")).json()["trainer.max_staleness"] == 2


async def test_what_engines_do_is_read_from_the_spans(client: httpx.AsyncClient, runs: list[Path]) -> None:
    """With the pushes, of which each run without spans has at least these."""
    add_spans(runs[0])
    first, second = [(await client.get(f"/api/runs/{number}/fleet")).json() for number in (0, 1)]
    assert [each["process"] for each in first["replicas"]] == ["rollout-0"]
    assert (second["replicas"], len(second["pushes"])) == ([], 3)


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/api/runs/7/steps", 404, "there is no run number 7; 2 are shown"),
        ("/api/runs/0/episodes/99", 404, "has no group number 99 now"),
        ("/api/runs/0/episodes?sort=size", 422, "sort = 'size' must be one of"),
        ("/api/runs/0/episodes?step=x", 422, "step = 'x'"),
        ("/api/runs/0/images/..%2Fconfig.toml", 404, "config.toml"),
        (f"/api/runs/0/images/{SHA}.gif", 404, "keeps no picture"),
        ("/%2e%2e/app.py", 404, "there is no page"),
        ("/vendor/uPlot.LICENSE", 404, "there is no page"),
    ],
)
async def test_what_is_not_there_is_named(client: httpx.AsyncClient, path: str, status: int, message: str) -> None:
    """And nothing outside of the pages and the runs is there."""
    answer = await client.get(path)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


async def test_nothing_that_a_policy_wrote_can_run(client: httpx.AsyncClient, runs: list[Path]) -> None:
    """Data is JSON, which no browser takes for a page, and pages run only their own files."""
    files = EpisodeFiles(runs[1] / "episodes", last_step=99, max_bytes=1e9)
    add_group(files, index=1, text="<script>alert(1)</script>")
    answer = await client.get("/api/runs/1/episodes/3")
    assert answer.headers["content-type"] == "application/json"
    for path in ("/", "/main.js", "/api/runs/1/episodes/3"):
        headers = (await client.get(path)).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'self'" in headers["content-security-policy"]
        assert "script-src" not in headers["content-security-policy"]


@pytest.mark.parametrize("name", sorted(_VENDORED))
def test_what_is_not_ours_is_as_it_was_published(name: str) -> None:
    """Files of uPlot 1.6.32, by their digests."""
    assert hashlib.sha256((_STATIC / "vendor" / name).read_bytes()).hexdigest() == _VENDORED[name]


async def test_what_processes_did_is_found_by_time(client: httpx.AsyncClient, runs: list[Path]) -> None:
    """The spans of the asked seconds, with the kept group that they belong to."""
    span = ["episode", 50.0, 2.0, {"group": "run/4/0/abc", "sample": 1}]
    batch = {
        "process": "worker-0", "host": "a", "pid": 1, "start": "s", "number": 1, "dropped": 0, "sent": 60.0,
        "spans": [span, ["episode", 70.0, 2.0, {}]],
    }  # fmt: skip
    row = json.dumps({"sequence": 1, "stored": 60.0, "batch": batch}) + "\n"
    (runs[0] / "trace").mkdir(exist_ok=True)
    (runs[0] / "trace" / "spans-0000000060000.jsonl").write_text(row)
    found = (await client.get("/api/runs/0/processes", params={"first": 49, "last": 60})).json()
    (drawn,) = found["spans"]
    assert (drawn["process"], drawn["name"], drawn["length"], drawn["group"]) == ("worker-0", "episode", 2.0, 4)
    until_the_end = (await client.get("/api/runs/0/processes", params={"first": 49})).json()
    assert [span["start"] for span in until_the_end["spans"]] == [50.0, 70.0]
    assert until_the_end["losses"] == []


async def test_what_processes_lost_is_told(client: httpx.AsyncClient, runs: list[Path]) -> None:
    """By each of them, between two of the batches that it sent."""
    batch = {"process": "worker-0", "host": "a", "pid": 1, "start": "s", "sent": 60.0, "spans": []}
    rows = [
        {"sequence": number, "stored": 60.0 + number, "batch": batch | {"number": number, "dropped": dropped}}
        for number, dropped in ((1, 0), (2, 12))
    ]
    (runs[0] / "trace").mkdir(exist_ok=True)
    (runs[0] / "trace" / "spans-0000000060000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = (await client.get("/api/runs/0/processes", params={"first": 49, "last": 62})).json()
    lost = {"process": "worker-0", "start": 61.0, "end": 62.0, "num_dropped": 12, "num_batches": 0}
    assert found["losses"] == [lost]
