"""What a run's folder tells those who look at it."""

import fcntl
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from services.trainer.telemetry.episodes.files import EpisodeFiles
from services.view import lock_file, run_reader
from services.view.alarms import Alarm, find_step_alarms
from services.view.run_reader import NotThereError, RunReader
from services.view.summary import describe_run
from services.view.trace_reader import Span, TraceReader
from tests.support.view_runs import SHA, add_group, make_run, step_row, write_rows
from tests.support.waiting import HANG_S, wait_until


def test_a_run_that_grows_is_read_on(tmp_path: Path) -> None:
    """Half-written lines wait for their end; rows that a resumed trainer took back are gone."""
    run = RunReader(tmp_path / "run")
    assert run.steps() == (0, [])
    write_rows(tmp_path / "run", [step_row(1)])
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
        file.flush()
        assert [row["step"] for row in run.steps()[1]] == [1]
        file.write('ard_mean": 1}\n')
    assert [row["step"] for row in run.steps()[1]] == [1, 2]
    replaced = tmp_path / "new"
    replaced.write_text(json.dumps(step_row(1)) + "\n")
    replaced.replace(tmp_path / "run" / "metrics.jsonl")
    generation, rows = run.steps()
    assert (generation, [row["step"] for row in rows]) == (1, [1])


def test_steps_are_examined_again_only_when_they_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every open page asks for the list of runs every two seconds, and a long run takes a third of one to examine."""
    examined: list[int] = []

    def find(rows: Sequence[Mapping[str, Any]]) -> list[Alarm]:
        examined.append(len(rows))
        return find_step_alarms(rows)

    monkeypatch.setattr(run_reader, "find_step_alarms", find)
    run = RunReader(tmp_path / "run")

    def kinds() -> list[str]:
        return list(describe_run(0, run)["alarm_kinds"])

    write_rows(tmp_path / "run", [step_row(1), step_row(2)])
    assert [kinds(), kinds()] == [[], []]
    write_rows(tmp_path / "run", [step_row(3, skipped=1.0)])
    assert [kinds(), kinds()] == [["skipped"], ["skipped"]]
    write_rows(tmp_path / "new", [step_row(step) for step in (1, 2, 3)])
    (tmp_path / "new" / "metrics.jsonl").replace(tmp_path / "run" / "metrics.jsonl")
    assert [kinds(), kinds()] == [[], []]
    assert examined == [2, 3, 3]


def test_steps_do_not_wait_for_the_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find its time among gigabytes of spans takes seconds, in which every open page asks for the list of runs."""
    run, may_end = RunReader(make_run(tmp_path / "run")), threading.Event()
    is_reading = threading.Event()

    def stream(*_: object) -> Iterator[Span]:
        is_reading.set()
        assert may_end.wait(HANG_S)
        return iter(())

    monkeypatch.setattr(TraceReader, "stream", stream)
    with ThreadPoolExecutor(2) as threads:
        reading = threads.submit(run.spans, 0.0, 1.0)
        assert is_reading.wait(HANG_S)
        try:
            assert len(threads.submit(run.steps).result(HANG_S)[1]) == 30
        finally:
            may_end.set()
        assert list(reading.result()) == []


def test_groups_are_found_by_their_place_in_the_index(tmp_path: Path) -> None:
    """Also where the file of their step grew afterwards; those that were deleted say so."""
    run = RunReader(tmp_path)
    files = EpisodeFiles(tmp_path / "episodes", last_step=0, max_bytes=1e9)
    for index in (3, 5):
        add_group(files, index=index, text=f"answer → {index}")
    assert [json.loads(run.episode(place))["index"] for place in (0, 1)] == [3, 5]
    with pytest.raises(NotThereError, match="has no group number 2 now"):
        run.episode(2)
    (tmp_path / "episodes" / "step-000001.jsonl").unlink()
    with pytest.raises(NotThereError, match=r"step 1 were deleted .* episodes.max_gib"):
        run.episode(0)


def test_a_group_keeps_its_number_when_older_ones_are_deleted(tmp_path: Path) -> None:
    """So that an open page, or an address that somebody was sent, never shows another group."""
    run = RunReader(tmp_path)
    files = EpisodeFiles(tmp_path / "episodes", last_step=0, max_bytes=12_000)
    numbers: dict[int, int] = {}
    for index in range(40):
        add_group(files, step=index, index=index)
        if index % 5 == 0:  # otherwise a reader misses that the index was cut
            numbers |= {entry["number"]: entry["index"] for entry in run.episodes()}
    left = [entry["number"] for entry in run.episodes()]
    assert left[-1] == 39
    assert 1 < len(left) < 20
    for number, index in numbers.items():
        if number in left:
            assert json.loads(run.episode(number))["index"] == index
        else:
            with pytest.raises(NotThereError, match=r"was deleted .* episodes.max_gib"):
                run.episode(number)


def test_a_group_that_is_played_again_after_a_restart_has_another_number(tmp_path: Path) -> None:
    """The address of the one that was discarded says that it is gone, and which are left."""
    run, episodes = RunReader(tmp_path), tmp_path / "episodes"
    for last_step in (0, 1):
        files = EpisodeFiles(episodes, last_step=last_step, max_bytes=1e9)
        for step in range(last_step + 1, 4):
            add_group(files, step=step, index=step, text=f"after step {last_step}")
    assert [(entry["number"], entry["step"]) for entry in run.episodes()] == [(0, 1), (3, 2), (4, 3)]
    for number in (1, 2):
        with pytest.raises(NotThereError, match=rf"number {number} now: .* checkpoint from which the run went on"):
            run.episode(number)
    assert json.loads(run.episode(3))["samples"][0]["text"] == "after step 1"


@pytest.mark.parametrize(
    "name", ["../../config.toml", f"{SHA}.html", f"/{SHA}.png", f"{SHA}.png/..", "ab" * 31 + ".png"]
)
def test_nothing_but_kept_pictures_is_a_picture(tmp_path: Path, name: str) -> None:
    """Whatever a caller asks for."""
    make_run(tmp_path, num_steps=1)
    assert RunReader(tmp_path).image(f"{SHA}.png").startswith(b"\x89PNG")
    with pytest.raises(NotThereError, match="keeps no picture"):
        RunReader(tmp_path).image(name)


def test_an_index_that_was_tampered_with_leads_nowhere_else(tmp_path: Path) -> None:
    """A run folder may come from somebody else."""
    (tmp_path / "episodes").mkdir()
    (tmp_path / "secret").write_text("secret")
    line = {"step": 1, "file": "../secret", "offset": 0, "size": 6}
    (tmp_path / "episodes" / "index.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(NotThereError, match="names no file of groups"):
        RunReader(tmp_path).episode(0)


@pytest.mark.parametrize(("lock", "is_launcher_s"), [(".lock", True), (".trainer.lock", False)])
def test_a_run_is_running_while_its_launcher_or_trainer_holds_a_lock(
    tmp_path: Path, lock: str, is_launcher_s: bool
) -> None:
    """Looking takes nothing from the holder."""
    run = RunReader(tmp_path)
    assert not run.is_running
    with (tmp_path / lock).open("w") as file:
        assert not run.is_running
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert (run.is_running, run.has_launcher) == (True, is_launcher_s)
        assert (run.is_running, run.has_launcher) == (True, is_launcher_s)
    assert not run.is_running


@pytest.mark.timeout(HANG_S)
def test_a_file_system_that_never_answers_holds_up_no_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS whose lockd cannot be reached blocks in spite of LOCK_NB. However often a page asks, one thread for each file
    waits until it answers."""
    make_run(tmp_path, num_steps=1)
    (tmp_path / ".lock").touch()
    (tmp_path / ".trainer.lock").touch()
    looking, answer = list[threading.Thread](), threading.Event()

    def flock(*_: object) -> None:
        looking.append(threading.current_thread())
        answer.wait()

    run = RunReader(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(lock_file, "_ANSWER_S", 0.1)
        patched.setattr(fcntl, "flock", flock)
        try:
            for _ in range(3):
                assert not describe_run(0, run)["is_running"]
        finally:
            answer.set()
        wait_until(lambda: len(looking) == 2)
        for thread in looking:
            thread.join()
    assert len(looking) == 2
    with (tmp_path / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert run.is_running


def test_a_run_is_known_by_its_folder_s_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from within; a link has a name of its own."""
    run = make_run(tmp_path / "first", num_steps=1)
    (tmp_path / "best").symlink_to(run)
    monkeypatch.chdir(run / "trace")
    names = [RunReader(folder).name for folder in (run, Path(".."), Path("../../best"))]
    monkeypatch.chdir(run)
    assert [*names, RunReader(Path()).name] == ["first", "first", "best", "first"]


def test_settings_have_dotted_names(tmp_path: Path) -> None:
    """As people write them on the command line."""
    make_run(tmp_path, num_steps=1, max_staleness=2)
    assert RunReader(tmp_path).settings() == {
        "run.name": "run",
        "trainer.num_steps": 200,
        "trainer.max_staleness": 2,
    }
    (tmp_path / "config.toml").write_text("broken")
    assert RunReader(tmp_path).settings() == {}
