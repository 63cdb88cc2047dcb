"""The table of `penstock runs list`."""

import pytest

from services.cli.runs.command import _print, _Row


def test_names_in_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Folders and addresses are shown as they are, so that they can be given to `penstock runs delete`."""
    _print([_Row(run="x", folder="b [old]/x", bus_url="nats://[fd00::5]:4222", bus_bytes=2048)])
    shown = capsys.readouterr().out
    assert "b [old]/x" in shown
    assert "2 KiB at nats://[fd00::5]:4222" in shown
