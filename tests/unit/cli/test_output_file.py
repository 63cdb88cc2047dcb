"""The file that a person names for a command's output."""

import os
from pathlib import Path

from services.cli.output_file import output_file


def test_a_link_stays_and_leads_to_the_new_file(tmp_path: Path) -> None:
    """A folder of results may hold links to another disk."""
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    for content in (b"first", b"second"):
        with output_file(link) as out:
            out.write(content)
        assert (link.is_symlink(), file.read_bytes()) == (True, content)


def test_a_pipe_is_written_itself(tmp_path: Path) -> None:
    """Nor is a device replaced by a file, even if the person may do that."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with output_file(pipe) as out:
            out.write(b"page")
        assert (pipe.is_fifo(), os.read(reading, 10)) == (True, b"page")
    finally:
        os.close(reading)


def test_rights_stay(tmp_path: Path) -> None:
    """A page that others may not read stays such a page."""
    file = tmp_path / "page.html"
    file.touch(mode=0o600)
    with output_file(file) as out:
        out.write(b"page")
    assert file.stat().st_mode & 0o777 == 0o600
