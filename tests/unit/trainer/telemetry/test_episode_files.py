"""The folder of kept groups: its size, and what kills leave in it."""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from services.trainer.telemetry.episodes.files import DescribedGroup, EpisodeFiles

_SHARED = b"\x89PNG shared" + b"s" * 500


def described(files: EpisodeFiles, step: int, *, size: int = 400, pictures: tuple[bytes, ...] = ()) -> DescribedGroup:
    """A group whose pictures are written."""
    names = files.add_images({hashlib.sha256(data).hexdigest(): data for data in pictures})
    images = list(names.values())
    whole = {"step": step, "text": "x" * size, "images": images}
    return DescribedGroup.of(whole, {"step": step}, image_files=images)


def add(files: EpisodeFiles, step: int, **about: Any) -> None:
    """Add a group with its pictures."""
    files.add(step, [described(files, step, **about)])


def picture(number: int) -> bytes:
    """A picture that no other group has."""
    return b"\x89PNG" + bytes([number]) * 600


def size_of(folder: Path) -> int:
    """Size of everything in the folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def index_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of the index."""
    return [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]


def require_whole(folder: Path) -> None:
    """Check that everything that the index names is there, and nothing else."""
    images, files = set(), set()
    for entry in index_of(folder):
        data = (folder / entry["file"]).read_bytes()[entry["offset"] :][: entry["size"]]
        images |= {*json.loads(data)["images"]}
        files.add(entry["file"])
    assert {path.name for path in (folder / "images").iterdir()} == images
    assert {path.name for path in folder.glob("step-*")} == files


@pytest.mark.parametrize("restarts", [False, True])
def test_the_folder_stays_below_its_size(tmp_path: Path, restarts: bool) -> None:
    """With pictures, of which each group has a new one, and index. The oldest steps go first, with their pictures; a
    picture that a later step shows stays."""
    files = EpisodeFiles(tmp_path, last_step=-1, max_bytes=12_000)
    for step in range(40):
        if restarts:
            files = EpisodeFiles(tmp_path, last_step=step, max_bytes=12_000)
        for place in (0, 1):
            add(files, step, pictures=(_SHARED, picture(2 * step + place)))
            assert size_of(tmp_path) <= 12_000
        require_whole(tmp_path)
    steps = [entry["step"] for entry in index_of(tmp_path)]
    assert steps == sorted(2 * [*range(40)])[-len(steps) :]
    assert len(steps) >= 8


def test_the_newest_step_stays_even_if_it_alone_is_too_large(tmp_path: Path) -> None:
    """And with it all of its pictures."""
    files = EpisodeFiles(tmp_path, last_step=0, max_bytes=3000)
    for number in range(3):
        add(files, number, pictures=(picture(number),))
    add(files, 6, size=5000, pictures=(picture(6), picture(7)))
    add(files, 6, pictures=(picture(8),))
    assert [entry["step"] for entry in index_of(tmp_path)] == [6, 6]
    require_whole(tmp_path)


def test_what_a_crashed_trainer_took_too_far_goes_first(tmp_path: Path) -> None:
    """It counts as long as it is there, with its lines of the index and its pictures."""
    files = EpisodeFiles(tmp_path, last_step=0, max_bytes=8000)
    add(files, 1, pictures=(picture(1),))
    for step in (2, 3):
        add(files, step, pictures=(picture(step),))
    files = EpisodeFiles(tmp_path, last_step=1, max_bytes=8000)
    assert len([*(tmp_path / "discarded").iterdir()]) == 2
    assert len([*(tmp_path / "images").iterdir()]) == 3
    for step in range(2, 7):
        add(files, step, pictures=(picture(10 + step),))
        assert size_of(tmp_path) <= 8000
    assert not (tmp_path / "discarded").exists()
    assert not (tmp_path / "index-discarded.jsonl").exists()
    assert [entry["step"] for entry in index_of(tmp_path)] == [*range(1, 7)]
    require_whole(tmp_path)


def test_a_line_that_a_kill_cut_off_takes_no_other_along(tmp_path: Path) -> None:
    """Wherever it was cut, a reader of lines finds every group that was written whole, and the next one."""
    files = EpisodeFiles(tmp_path / "whole", last_step=1, max_bytes=1e9)
    add(files, 1, size=9)
    add(files, 1, size=9)
    data = (tmp_path / "whole" / "step-000001.jsonl").read_bytes()
    index = (tmp_path / "whole" / "index.jsonl").read_bytes()
    first, second = data.index(b"\n") + 1, index.index(b"\n") + 1
    for cut in range(first + 1, len(data) + 1):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / "step-000001.jsonl").write_bytes(data[:cut])
        (folder / "index.jsonl").write_bytes(index[:second])  # it is written afterwards
        add(EpisodeFiles(folder, last_step=1, max_bytes=1e9), 1, size=10)
        lines = (folder / "step-000001.jsonl").read_bytes().split(b"\n")
        texts = [len(json.loads(line)["text"]) for line in lines if line.endswith(b"}")]
        assert texts == ([9, 9, 10] if cut >= len(data) - 1 else [9, 10])
        require_whole(folder)


@pytest.mark.parametrize("name", ["step-000001.jsonl", "index.jsonl"])
def test_groups_that_are_written_together_are_whole_or_absent(tmp_path: Path, name: str) -> None:
    """Wherever a kill cut them off; those that come afterwards are whole, with their own pictures."""
    whole = tmp_path / "whole"
    files = EpisodeFiles(whole, last_step=1, max_bytes=1e9)
    files.add(1, [described(files, 1, size=9, pictures=(picture(place),)) for place in range(3)])
    require_whole(whole)
    assert [entry["number"] for entry in index_of(whole)] == [0, 1, 2]
    written = (whole / name).read_bytes()
    for cut in range(len(written)):
        folder = tmp_path / str(cut)
        shutil.copytree(whole, folder)
        (folder / name).write_bytes(written[:cut])
        if name != "index.jsonl":
            (folder / "index.jsonl").write_bytes(b"")  # it is written afterwards
        files = EpisodeFiles(folder, last_step=1, max_bytes=1e9)
        files.add(1, [described(files, 1, size=10, pictures=(picture(place),)) for place in range(2)])
        lines = [line for line in (folder / "index.jsonl").read_bytes().split(b"\n") if line.endswith(b"}")]
        entries = [json.loads(line) for line in lines]
        data = (folder / "step-000001.jsonl").read_bytes()
        groups = [json.loads(data[entry["offset"] :][: entry["size"]]) for entry in entries]
        num_before = written[: cut + 1].count(b"}\n") if name == "index.jsonl" else 0
        assert [len(group["text"]) for group in groups] == [9] * num_before + [10, 10]
        assert all((folder / "images" / image).exists() for group in groups for image in group["images"])


def test_a_line_is_whole_where_the_system_writes_it_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does with large ones, and just before a disk is full."""
    files, write = EpisodeFiles(tmp_path, last_step=1, max_bytes=1e9), os.write
    with monkeypatch.context() as slow:
        slow.setattr(os, "write", lambda file, data: write(file, data[:100]))
        for _ in range(2):
            add(files, 1)
    assert len(index_of(tmp_path)) == 2
    require_whole(tmp_path)


def test_a_full_disk_leaves_no_group_that_nobody_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is full in the middle of the index: groups that are written together are dropped together."""
    files, write = EpisodeFiles(tmp_path, last_step=1, max_bytes=1e9), os.write
    add(files, 1, pictures=(picture(1),))
    three = [described(files, 2, pictures=(picture(number),)) for number in (2, 3, 4)]

    def fill(file: int, data: memoryview) -> int:
        if b'"offset"' not in bytes(data):
            return write(file, data)
        if bytes(data).count(b"\n") < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[: len(data) // 2])

    with monkeypatch.context() as full:
        full.setattr(os, "write", fill)
        with pytest.raises(OSError, match="No space left"):
            files.add(2, three)
    assert [entry["step"] for entry in index_of(tmp_path)] == [1]
    add(files, 3, pictures=(picture(2),))
    assert [entry["step"] for entry in index_of(tmp_path)] == [1, 3]


def test_a_number_is_never_given_again(tmp_path: Path) -> None:
    """Not that of a group that was discarded, over several restarts and after what they left behind was deleted."""
    numbers: list[int] = []
    for size in (400, 400, 6000):
        files = EpisodeFiles(tmp_path, last_step=1, max_bytes=12_000)
        for step in (2, 3):
            add(files, step, size=size)
            numbers.append(index_of(tmp_path)[-1]["number"])
    assert not (tmp_path / "index-discarded.jsonl").exists()
    add(EpisodeFiles(tmp_path, last_step=3, max_bytes=12_000), 4)
    assert [*numbers, index_of(tmp_path)[-1]["number"]] == [*range(7)]


def test_a_line_that_a_full_disk_cut_off_takes_no_other_along(tmp_path: Path) -> None:
    """The run goes on, and so do both files."""
    files = EpisodeFiles(tmp_path, last_step=1, max_bytes=1e9)
    add(files, 1)
    for name in ("step-000001.jsonl", "index.jsonl"):
        with (tmp_path / name).open("ab") as file:
            file.write(b'{"step": 1, "te')
    add(files, 1)
    entries = [json.loads(line) for line in (tmp_path / "index.jsonl").read_text().splitlines() if line[-1] == "}"]
    assert [entry["number"] for entry in entries] == [0, 1]
    for entry in entries:
        data = (tmp_path / entry["file"]).read_bytes()[entry["offset"] :][: entry["size"]]
        assert json.loads(data)["step"] == 1
