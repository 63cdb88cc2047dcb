"""Folders that benchmarks keep their runs in."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bench import bench_evaluation, chaos
from bench.async_loop import bench_async
from bench.demo import bench_demo, bench_zoom, penstock_run
from bench.scale import bench_scale
from bench.support.new_folder import new_folder


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (bench_async._parse, "--folder"),
        (bench_demo.main, "--runs"),
        (bench_evaluation._parse, "--folder"),
        (bench_scale._parse, "--folder"),
        (bench_zoom.main, "--runs"),
        (chaos.parse, "--runs"),
    ],
)
def test_the_folder_of_an_earlier_measurement_is_refused(
    command: Callable[[], object],
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At the start, not when the new measurement has ended and its run is sought among two."""
    (tmp_path / "seed-0").mkdir()
    monkeypatch.setattr("sys.argv", ["benchmark", option, str(tmp_path)])
    monkeypatch.setattr(penstock_run, "PENSTOCK", ("false",))
    with pytest.raises(SystemExit, match="2"):
        command()
    assert f"argument {option}: {tmp_path} is not empty: remove it, or name a new folder" in capsys.readouterr().err


def test_a_new_folder_and_an_empty_one_are_taken(tmp_path: Path) -> None:
    """It need not exist."""
    assert new_folder(str(tmp_path)) == tmp_path
    assert new_folder(str(tmp_path / "new")) == tmp_path / "new"
