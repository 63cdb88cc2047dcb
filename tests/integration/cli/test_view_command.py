"""`penstock view` as a person starts it."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tomllib
import webbrowser
from pathlib import Path

import httpx
import pytest

from services.cli import main
from services.cli.browser import has_person, open_page
from services.cli.runs.view_command import find_runs, prepare
from tests.support.view_runs import make_run
from tests.support.waiting import HANG_S


def test_it_prints_an_address_that_opens_and_ends_with_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a token of its own, where there is none; a run that is given twice is shown once."""
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)
    first, second = make_run(tmp_path / "first", num_steps=2), make_run(tmp_path / "second", num_steps=3)
    command = [sys.executable, "-m", "services.cli", "view", first, tmp_path, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(r"2 runs at (http://127\.0\.0\.1:\d+/)\?token=([\w-]{32})\n", line)
            assert found is not None, line
            with httpx.Client(follow_redirects=True, timeout=HANG_S) as browser:
                assert "<title>Penstock</title>" in browser.get(found[0].split(" at ")[1].strip()).text
                runs = browser.get(f"{found[1]}api/runs").json()
            assert [run["folder"] for run in runs] == [str(first), str(second)]
            assert httpx.get(f"{found[1]}api/runs", timeout=HANG_S).status_code == 401
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) == 0


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    """Before anything starts."""
    command = [sys.executable, "-m", "services.cli", "view", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {tmp_path} holds no run; give a run folder, runs/<name>-<start>, or a folder of such\n"
    )


def test_a_port_that_no_server_has_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its range, in one line."""
    assert main(["view", str(make_run(tmp_path / "run", num_steps=1)), "--port=70000"]) == 2
    assert "'--port': Input should be less than or equal to 65535" in capsys.readouterr().err


def test_the_newest_run_of_a_folder_comes_first(tmp_path: Path) -> None:
    """It is the one that people look for."""
    folders = [make_run(tmp_path / name, num_steps=1) for name in ("b", "c", "a")]
    for age, folder in enumerate(folders):
        os.utime(folder, (1_700_000_000 + age, 1_700_000_000 + age))
    assert find_runs([tmp_path]) == folders[::-1]


def test_a_run_whose_trainer_has_no_launcher_is_shown(
    tmp_path: Path, nats_url: str, run_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in containers: `penstock serve trainer` keeps the recipe of each start, and a launcher's as it is."""
    (tmp_path / "data.jsonl").write_text('{"title": "of no use"}\n')  # the trainer begins, and ends at once
    command = ["serve", "trainer", "--config", "tiny-cpu", f"--bus.url={nats_url}", f"--run.name={run_name}"]
    command += [f"--run.dir={tmp_path}", f"--data.path={tmp_path}/data.jsonl"]
    for num_steps in (7, 9):
        assert main([*command, f"--run.folder={tmp_path / run_name}", f"--trainer.num_steps={num_steps}"]) == 2
        assert find_runs([tmp_path]) == [tmp_path / run_name]
        recipe = tomllib.loads((tmp_path / run_name / "config.toml").read_text())
        assert (recipe["model"]["path"], recipe["trainer"]["num_steps"]) == ("builtin:tiny-qwen3-vl", num_steps)
        assert "folder" not in recipe["run"]  # so that `penstock train RUN/config.toml` starts a run like it
    assert "has no column problem" in capsys.readouterr().err
    assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{run_name}: ")
    assert main(["runs", "list", str(tmp_path), "--json"]) == 0
    listed = {row["run"]: row["folder"] for row in json.loads(capsys.readouterr().out)}
    assert listed[run_name] == str(tmp_path / run_name)
    launched = make_run(tmp_path / "launched", num_steps=1)
    (launched / "live.toml").write_text("")  # a launcher's, which it writes before it starts any process
    before = (launched / "config.toml").read_text()
    assert main([*command, f"--run.folder={launched}"]) == 2
    assert (launched / "config.toml").read_text() == before


async def test_a_run_that_begins_can_be_shown_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `penstock train --view` does: an address that opens, with a token of its own, until the run ends."""
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)
    showing = prepare([make_run(tmp_path / "run", num_steps=1)], command="penstock train --view")
    async with showing as shown, httpx.AsyncClient(follow_redirects=True, timeout=HANG_S) as browser:
        address = shown.address
        assert (await browser.get(address.partition("?")[0])).status_code == 401
        assert (await browser.get(address)).status_code == 200
        (run,) = (await browser.get(f"{address.partition('?')[0]}api/runs")).json()
    assert run["folder"] == str(tmp_path / "run")
    async with httpx.AsyncClient(timeout=HANG_S) as browser:
        with pytest.raises(httpx.ConnectError):
            await browser.get(address)


@pytest.mark.parametrize("token", ["", "secret"])
async def test_an_address_for_a_program_lets_one_browser_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    """It has no token: a program's arguments are seen by all users of a machine."""
    monkeypatch.setenv("PENSTOCK_TOKEN", token)
    async with (
        prepare([make_run(tmp_path / "run", num_steps=1)], command="penstock train --view") as shown,
        httpx.AsyncClient(follow_redirects=True, timeout=HANG_S) as first,
        httpx.AsyncClient(follow_redirects=True, timeout=HANG_S) as second,
    ):
        assert "token" not in shown.address_once
        for browser, status in ((first, 200), (second, 401), (first, 200)):
            assert (await browser.get(shown.address_once)).status_code == status
        assert (await first.get(f"{shown.address_once.partition('?')[0]}api/runs")).status_code == 200


class Window(webbrowser.BaseBrowser):
    """A browser with a window of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []

    def open(self, url: str, new: int = 0, autoraise: bool = True) -> bool:
        """Note the address."""
        self.opened.append(url)
        return True


@pytest.mark.parametrize(
    ("is_terminal", "variables", "expected"),
    [
        (True, {"DISPLAY": ":0"}, True),
        (True, {"WAYLAND_DISPLAY": "wayland-0"}, True),
        (True, {}, False),
        (False, {"DISPLAY": ":0"}, False),
    ],
)
def test_a_browser_is_for_a_terminal_with_a_display(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, variables: dict[str, str], expected: bool
) -> None:
    """In a pipe, in a container or over ssh nobody would see it."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert has_person() is expected


def test_a_browser_in_the_terminal_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the terminal that shows the run."""
    window = Window()
    monkeypatch.setattr(webbrowser, "get", lambda: window)
    assert open_page("http://127.0.0.1:1/?key=k")
    assert window.opened == ["http://127.0.0.1:1/?key=k"]
    monkeypatch.setattr(webbrowser, "get", lambda: webbrowser.GenericBrowser("false"))
    assert not open_page("http://127.0.0.1:1/?key=k")


def test_runs_are_written_into_one_file(tmp_path: Path) -> None:
    """It says what it holds and what it lacks; a place that cannot be written, or a second file, is an error."""
    runs, file = [make_run(tmp_path / name, num_steps=20) for name in ("a", "b")], tmp_path / "out.html"
    command = [sys.executable, "-m", "services.cli", "view", *map(str, runs)]
    done = subprocess.run([*command, "--export", str(file)], capture_output=True, text=True, timeout=200, check=False)
    size = f"{file.stat().st_size / 2**20:.1f} MiB"
    assert done.stdout == f"2 runs in {file}, {size}\n" + "".join(
        f"left out of {name}: the timeline but of steps 9 to 20\n" for name in ("a", "b")
    )
    assert file.read_text().startswith("<!doctype html>")
    wrong = subprocess.run(
        [*command, "--export", str(tmp_path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert (wrong.returncode, wrong.stderr) == (
        2,
        f"error: --export={tmp_path}: Is a directory; give a file that can be written\n",
    )
    both = subprocess.run(
        [*command, "--export", "x", "--trace", "y"], capture_output=True, text=True, timeout=200, check=False
    )
    assert (both.returncode, both.stderr) == (
        2,
        "error: --trace=y and --export=x each write one file and end; give one of them\n",
    )


def test_what_processes_did_is_written_for_perfetto(tmp_path: Path) -> None:
    """One file in the Trace Event Format; several runs, or none with spans, are an error."""
    run, file = make_run(tmp_path / "run", num_steps=3), tmp_path / "trace.json"
    command = [sys.executable, "-m", "services.cli", "view", str(run), "--trace", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    events = json.loads(file.read_text())["traceEvents"]
    assert done.stdout == f"{len(events)} events in {file}; open it in ui.perfetto.dev\n"
    assert {each["name"] for each in events if each["ph"] == "X"} == {"train_s", "wait_s", "push"}
    (run / "trace" / "trainer.jsonl").unlink()
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (2, f"error: {run} has no spans; see trace.max_gib\n")


@pytest.mark.parametrize("option", ["--export", "--trace"])
def test_a_full_disk_leaves_the_file_of_an_earlier_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    """It is replaced once the new one is complete; the error says what to do."""
    run, file = make_run(tmp_path / "run", num_steps=3), tmp_path / "out"
    file.write_text("earlier")
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, usual[1]))
    try:
        assert main(["view", str(run), f"{option}={file}"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert capsys.readouterr().err == f"error: {option}={file}: File too large; give a file that can be written\n"
    assert file.read_text() == "earlier"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}
