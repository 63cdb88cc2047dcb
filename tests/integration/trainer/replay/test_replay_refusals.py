"""Replay refuses what cannot be computed again, and names it."""

import resource
import shutil
import signal
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.errors import ConfigError, SetupError
from services.cli.replay import run as replaying
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.replay.replay import start_of
from services.trainer.replay.run import RecordedRun, opened_run
from tests.support.trainer.runs.recorded_run import MODEL, RECORDED, copied, replayed


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    """A copy of the recorded run, to change."""
    return copied(tmp_path)


def test_an_export_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    """Before the run is even looked at: a replay takes minutes."""
    (tmp_path / "there.tar").write_text("")
    for name, words in (("there.tar", "exists already; give another name"), ("no/x.tar", "there is no folder .*no;")):
        with pytest.raises(SetupError, match=words):
            replaying.replay(tmp_path / "no run", step=1, overrides=[], export=tmp_path / name)


@pytest.mark.parametrize("file", ["step.json", "group", "image-"])
def test_a_damaged_recording_is_named(run: RecordedRun, file: str) -> None:
    """Whichever of its files is cut short, or gone."""
    (damaged, *_) = sorted(each for each in (run.groups / "step-000002").iterdir() if each.name.startswith(file))
    if file == "image-":
        damaged.unlink()
    else:
        damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(SetupError, match=r"the recording .*step-000002 is incomplete or damaged: .*; take another"):
        run.recording(2)


def test_says_what_is_missing(run: RecordedRun, tmp_path: Path) -> None:
    """A step that is not recorded, a gap before it, no step named, a file of something else."""
    with pytest.raises(SetupError, match=r"step 9 is not recorded in .*; recorded: 1, 2, 3"):
        replayed(run, 9, tmp_path)
    with pytest.raises(SetupError, match="give --step N; recorded: 1, 2, 3"):
        run.only_step()
    shutil.rmtree(run.groups / "step-000002")
    with pytest.raises(SetupError, match="no checkpoint before it is kept, and step 2 is not recorded"):
        replayed(run, 3, tmp_path)
    shutil.rmtree(run.groups)
    with pytest.raises(SetupError, match=r"no step is recorded; train with --trainer\.record_groups=true"):
        replayed(run, 1, tmp_path)
    (tmp_path / "other").write_text("no tar")
    with pytest.raises(SetupError, match="neither a run folder nor a file"), opened_run(tmp_path / "other"):
        pass


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """The recorded run as one file."""
    file = tmp_path / "run.tar"
    with tarfile.open(file, "w") as archive:
        archive.add(RECORDED, "")
    return file


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Within the context no file may become larger: writing then fails as where a quota is used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_lack_of_temporary_room_is_told(run: RecordedRun, exported: Path, tmp_path: Path) -> None:
    """While a file is unpacked, and where the step before is computed; the remedy is another folder."""
    unpacking = r"File too large; .* to unpack .*run\.tar, make room there, or set TMPDIR to another folder$"
    with largest_file(100), pytest.raises(SetupError, match=unpacking), opened_run(exported):
        pass
    computing = r"no room for the checkpoint of step 1 .*; make room there, or set TMPDIR to another folder$"
    with largest_file(100_000), pytest.raises(SetupError, match=computing):
        start_of(run, 2, model_path=MODEL, scratch=tmp_path)


def test_an_end_by_sigterm_leaves_nothing_unpacked(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after Ctrl-C."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(replaying, "start_of", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(KeyboardInterrupt):
            replaying.replay(exported, step=1, overrides=[], export=None)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert not [*temporary.iterdir()]


def test_refuses_another_model_and_another_history(run: RecordedRun, tiny_model_path: Path, tmp_path: Path) -> None:
    """The weights to start from have the recorded digest, or nothing is computed."""
    with pytest.raises(SetupError, match=r"holds another model .*; give the right one by --model\.path"):
        start_of(run, 1, model_path=tiny_model_path, scratch=tmp_path)
    with pytest.raises(SetupError, match=r"no checkpoint precedes the step, and model\.path = .* has no model"):
        start_of(run, 1, model_path=tmp_path / "gone", scratch=tmp_path)
    before_second = start_of(run, 2, model_path=MODEL, scratch=tmp_path)
    store = CheckpointStore(run.path / "checkpoints", keep=1)
    own = shutil.ignore_patterns("manifest.json", "state.json")

    def copy(folder: Path) -> None:
        shutil.copytree(before_second.path, folder, ignore=own, dirs_exist_ok=True)

    store.save(2, {}, copy)
    with pytest.raises(SetupError, match="is a checkpoint of another history than step 3"):
        start_of(run, 3, model_path=MODEL, scratch=tmp_path)


def test_refuses_settings_that_no_step_has(run: RecordedRun) -> None:
    """An override that cannot change the step is a mistake."""
    with pytest.raises(ConfigError, match=r"unknown key trainer\.checkpoint_every; known here: .*optimizer"):
        run.recording(1, ["--trainer.checkpoint_every=7"])
