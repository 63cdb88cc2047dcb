"""The file that a person names for a command's output."""

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


def test_a_device_is_written_itself(tmp_path: Path) -> None:
    """It is not replaced by a file, even if the person may do that."""
    device = tmp_path / "null"
    device.symlink_to("/dev/null")
    with output_file(device) as out:
        out.write(b"gone")
    assert device.is_char_device()
