"""`penstock runs`, as a person would run it, on folders and on a real nats-server."""

import asyncio
import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.bus.buckets.leases import held
from penstock.bus.buckets.lock import TRAINER, locked
from penstock.bus.connection import Bus
from penstock.weights.version_folders import claim
from services.cli.app import main
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.telemetry.running_lock import shown_as_running
from tests.support.bus.stored_run import store_everything
from tests.support.nfs import rename_open_files
from tests.support.view_runs import make_run
from tests.support.waiting import HANG_S

PENSTOCK = Path(sys.executable).parent / "penstock"
LEASE_TTL_S = 12.0
"""Commands that meet a held lock wait about as long, and this process must renew it in time."""


async def penstock_runs(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `penstock runs`."""
    command = [sys.executable, "-m", "services.cli", "runs", *map(str, arguments)]
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=200, check=False, stdin=subprocess.DEVNULL
    )


def make_stored_run(folder: Path, bus: Bus, run: str, *, started_at: float = 1e9) -> Path:
    """A run folder of three steps, whose NATS is that of `bus`."""
    make_run(folder, num_steps=3)
    (folder / "config.toml").write_text(
        f'[run]\nname = "{run}"\n[bus]\nurl = "{bus.config.url}"\nlease_ttl_s = {LEASE_TTL_S}\n'
        "from_a_later_version = 1\n"
    )
    os.utime(folder / "config.toml", (started_at, started_at))
    return folder


@pytest.mark.slow
async def test_lists_runs_in_folders_and_on_nats(bus: Bus, run_name: str, tmp_path: Path) -> None:
    """State, step, age and size; what NATS stores counts for the latest folder of the run; others have no folder."""
    old = make_stored_run(tmp_path / "old", bus, run_name, started_at=1e9)
    new = make_stored_run(tmp_path / "new", bus, run_name, started_at=2e9)
    for folder, age in ((old, 1e9), (new, 1.5e9)):
        os.utime(folder / "metrics.jsonl", (age, age))
    make_run(tmp_path / "own-bus", num_steps=200)
    await bus.publish(bus.prompts, b"x" * 5000, message_id="a")
    async with locked(bus, TRAINER, ttl_s=LEASE_TTL_S):
        listed = await penstock_runs("list", tmp_path, "--json")
        assert listed.returncode == 0, listed.stderr
        rows = {row["folder"]: row for row in json.loads(listed.stdout)}
        assert (rows[str(new)]["state"], rows[str(old)]["state"]) == ("running", "stopped")
    table = await penstock_runs("list", tmp_path)
    assert rows[str(new)]["bus_bytes"] > 5000
    assert rows[str(old)]["bus_bytes"] is None
    assert (rows[str(new)]["step"], rows[str(new)]["num_steps"]) == (3, 200)
    assert rows[str(new)]["size_bytes"] > 0
    assert rows[str(tmp_path / "own-bus")]["state"] == "finished"
    assert "3 of 200" in table.stdout
    elsewhere = await penstock_runs("list", tmp_path / "nothing", "--url", bus.config.url, "--json")
    [row] = [row for row in json.loads(elsewhere.stdout) if row["run"] == run_name]
    assert (row["folder"], row["state"]) == ("", "stopped")
    away = await penstock_runs("list", tmp_path / "nothing", "--url", "nats://127.0.0.1:9")
    assert (away.returncode, "no runs" in away.stdout, "127.0.0.1:9" in away.stderr) == (0, True, True)


async def test_deletes_a_run_in_both_places(bus: Bus, run_name: str, tmp_path: Path) -> None:
    """All streams and buckets go with the folder, images too; another run's stay; what a later run of that name uses is
    its own."""
    old = make_stored_run(tmp_path / "old", bus, run_name)
    new = make_stored_run(tmp_path / "new", bus, run_name, started_at=2e9)
    await store_everything(bus, lease_ttl_s=LEASE_TTL_S)
    asked = await penstock_runs("delete", new)
    assert (asked.returncode, "give --yes" in asked.stderr, new.exists()) == (2, True, True)
    first = await penstock_runs("delete", old, "--yes")
    assert first.returncode == 0, first.stderr
    assert "is a later run of that name" in first.stdout
    assert (old.exists(), await stored_names(bus, run_name)) == (False, 11)
    second = await penstock_runs("delete", new, "--yes")
    assert second.returncode == 0, second.stderr
    assert (new.exists(), await stored_names(bus, run_name)) == (False, 0)
    by_name = await penstock_runs("delete", run_name, "--url", bus.config.url, "--yes")
    assert (by_name.returncode, f"stores no run {run_name!r}" in by_name.stderr) == (2, True)
    await store_everything(bus, lease_ttl_s=LEASE_TTL_S)
    by_name = await penstock_runs("delete", run_name, "--url", bus.config.url, "--yes")
    assert (by_name.returncode, await stored_names(bus, run_name)) == (0, 0)


async def test_a_recipe_that_cannot_be_read_hides_no_other_run(bus: Bus, run_name: str, tmp_path: Path) -> None:
    """Its run is listed with a warning, and may be the later one whose groups are on NATS."""
    old = make_stored_run(tmp_path / "old", bus, run_name)
    make_run(tmp_path / "torn", num_steps=3)
    (tmp_path / "torn/config.toml").write_text(f'[run]\nname = "{run_name}"\n[bus]\nurl = 3\n')
    listed = await penstock_runs("list", tmp_path, "--json")
    assert "torn/config.toml: [bus], [security] or trainer.weight_sync.files_dir cannot be read" in listed.stderr
    rows = [row for row in json.loads(listed.stdout) if row["folder"]]  # other tests' runs have none here
    assert {row["folder"]: row["run"] for row in rows} == {str(old): run_name, str(tmp_path / "torn"): run_name}
    deleted = await penstock_runs("delete", old, "--yes")
    assert deleted.returncode == 0, deleted.stderr
    assert f"{tmp_path}/torn is a later run of that name" in deleted.stdout
    assert (old.exists(), await stored_names(bus, run_name) >= 3) == (False, True)


@pytest.mark.slow
async def test_a_run_that_is_live_stays(bus: Bus, run_name: str, tmp_path: Path) -> None:
    """Its launcher works in the folder, or its trainer or an engine is alive on any machine."""
    folder = make_stored_run(tmp_path / "live", bus, run_name)
    async with locked(bus, TRAINER, ttl_s=LEASE_TTL_S):
        trainer = await penstock_runs("delete", folder, "--yes")
    assert "another trainer of this run is running already" in trainer.stderr
    replicas = await bus.bucket("replicas", ttl_s=LEASE_TTL_S)
    async with held(replicas, "engine-7", lambda: b"x", ttl_s=LEASE_TTL_S) as lease:
        await lease.renew()
        engine = await penstock_runs("delete", folder, "--yes")
    assert "has engines on NATS" in engine.stderr
    assert "engine-7" in engine.stderr
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        launcher = await penstock_runs("delete", folder, "--yes", "--keep-bus")
    assert "stop it first" in launcher.stderr
    assert {each.returncode for each in (trainer, engine, launcher)} == {2}
    assert (folder.exists(), await stored_names(bus, run_name) >= 3) == (True, True)


@pytest.mark.slow
async def test_only_run_folders_are_deleted(tmp_path: Path) -> None:
    """Neither any other folder, whatever its config.toml is, nor what a link leads to."""
    run, other = make_run(tmp_path / "run", num_steps=1), tmp_path / "other"
    other.mkdir()
    (tmp_path / "link").symlink_to(run)
    recipe = tmp_path / "with-a-recipe"
    recipe.mkdir()
    (recipe / "config.toml").write_text('[run]\nname = "mine"\n')
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "config.toml").write_text("[server]\nport = 8501\n")
    (project / ".lock").touch()
    for path in (other, tmp_path / "link", tmp_path / "missing", recipe, project):
        refused = await penstock_runs("delete", run, path, "--yes")
        assert (refused.returncode, f"{path} is no run folder" in refused.stderr) == (2, True)
    assert run.exists()


def test_a_run_without_a_launcher_is_deleted(tmp_path: Path) -> None:
    """As in containers, where nobody takes a lock; its trainer has claimed the checkpoints."""
    folder = tmp_path / "run"
    CheckpointStore(folder / "checkpoints", keep=1).claim()
    (folder / "config.toml").write_text('[run]\nname = "run"\n')
    assert main(["runs", "delete", str(folder), "--yes"]) == 0
    assert not folder.exists()


async def test_a_run_whose_trainer_has_no_launcher_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where NATS is not asked."""
    folder = make_run(tmp_path / "run", num_steps=1)
    async with shown_as_running(folder):
        code = await asyncio.to_thread(main, ["runs", "delete", str(folder), "--keep-bus", "--yes"])
    assert (code, (folder / "metrics.jsonl").exists()) == (2, True)
    assert f"a trainer is running in {folder}; stop the run first" in capsys.readouterr().err


@pytest.mark.parametrize("slow", ["command.require_unserved_store", "deletion.remove_versions"])
def test_a_run_whose_trainer_is_started_again_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], slow: str
) -> None:
    """As compose does with a trainer that ended, while the command looks for its server or removes weight files."""
    folder = make_run(tmp_path / "run", num_steps=1)
    files = tmp_path / "weights" / "run"
    (folder / "config.toml").write_text(
        f'[run]\nname = "run"\n[trainer.weight_sync]\nfiles_dir = "{tmp_path}/weights"\n'
    )
    (files / "v00000001").mkdir(parents=True)
    claim(files, folder)
    with (folder / ".trainer.lock").open("w") as lock:

        def start(*_: object) -> None:
            fcntl.flock(lock, fcntl.LOCK_EX)

        async def start_while_asked(*_: object) -> None:
            start()

        monkeypatch.setattr(f"services.cli.runs.{slow}", start if "remove" in slow else start_while_asked)
        assert main(["runs", "delete", str(folder), "--keep-bus", "--yes"]) == 2
    assert f"a trainer is running in {folder}; stop the run first" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").exists()
    assert (files / "v00000001").is_dir()


async def test_a_file_system_that_answers_late_hides_no_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As NFS whose lockd is started again: who keeps launchers out waits for it, a look at the trainer's lock does
    not."""
    folder = make_run(tmp_path / "run", num_steps=1)
    flock, answers = fcntl.flock, threading.Event()

    def take(file: Any, how: int) -> None:
        if threading.current_thread().name == "lock_file":
            answers.wait(HANG_S)
        else:
            answers.set()
        flock(file, how)

    async with shown_as_running(folder):
        monkeypatch.setattr(fcntl, "flock", take)
        code = await asyncio.to_thread(main, ["runs", "delete", str(folder), "--keep-bus", "--yes"])
    assert (code, (folder / "metrics.jsonl").exists()) == (2, True)
    assert f"a trainer is running in {folder}; stop the run first" in capsys.readouterr().err


def test_weight_files_elsewhere_go_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own, complete or not; another run's in the same folder stay, and so do foreign files."""
    shared = tmp_path / "weights"
    runs = [make_run(tmp_path / name, num_steps=1) for name in ("a", "b")]
    for run in runs:
        (run / "config.toml").write_text(
            f'[run]\nname = "{run.name}"\n[trainer.weight_sync]\nfiles_dir = "{shared}"\nfrom_a_later_version = 1\n'
        )
        for name in ("v00000001", "v00000002", ".v00000003-0123abcd"):
            (shared / run.name / name).mkdir(parents=True)
            (shared / run.name / name / "model.safetensors").touch()
        claim(shared / run.name, run)
    assert main(["runs", "delete", str(runs[0]), "--yes"]) == 0
    assert f", its weight files in {shared}/a\n" in capsys.readouterr().out
    assert [path.name for path in shared.iterdir()] == ["b"]
    (shared / "b" / "notes").touch()
    assert main(["runs", "delete", str(runs[1]), "--yes"]) == 0
    assert [path.name for path in (shared / "b").iterdir()] == ["notes"]


def test_weight_files_of_a_run_of_the_same_name_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It runs where the deleted one was before that was moved, or under another parent folder."""
    moved, live = (make_run(tmp_path / parent / "exp", num_steps=1) for parent in ("archive", "runs"))
    for run in (moved, live):
        (run / "config.toml").write_text(
            f'[run]\nname = "exp"\n[trainer.weight_sync]\nfiles_dir = "{tmp_path}/weights"\n'
        )
    (tmp_path / "weights" / "exp" / "v00000040").mkdir(parents=True)
    claim(tmp_path / "weights" / "exp", live)
    assert main(["runs", "delete", str(moved), "--yes"]) == 0
    assert "weight files" not in capsys.readouterr().out
    assert (tmp_path / "weights" / "exp" / "v00000040").is_dir()


def test_a_folder_on_nfs_is_deleted_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock, which is open while the rest goes, too."""
    rename_open_files(monkeypatch)
    run = make_run(tmp_path / "run", num_steps=1)
    (run / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    assert main(["runs", "delete", str(run), "--yes"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def test_a_folder_that_cannot_be_deleted_stays_a_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that the command can be given again."""
    run = make_run(tmp_path / "run", num_steps=1)
    unlink, refused = os.unlink, ["metrics.jsonl"]

    def refuse(path: Any, *, dir_fd: int | None = None) -> None:
        if refused and Path(path).name == refused[0]:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refuse)
    assert main(["runs", "delete", str(run), "--yes"]) == 2
    assert "metrics.jsonl cannot be removed: Permission denied" in capsys.readouterr().err
    refused.clear()
    assert main(["runs", "delete", str(run), "--yes"]) == 0
    assert not run.exists()


async def stored_names(bus: Bus, run: str) -> int:
    """How many streams, those of buckets among them, NATS has of the run."""
    return sum(run in (info.config.name or "") for info in await bus.jetstream.streams_info())
