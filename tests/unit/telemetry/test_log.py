"""What every line of a process's log names."""

import json
import threading
from pathlib import Path

import pytest
import structlog

from penstock.config import LogConfig
from penstock.telemetry import log


def test_a_closed_file_takes_nothing_more(tmp_path: Path) -> None:
    """What still logs goes on."""
    file = tmp_path / "own.log"
    log.configure(LogConfig(format="json"), service="trainer", file=file)
    logger = structlog.get_logger()
    logger.info("run.began")
    log.close_file()
    logger.info("run.ended")
    assert [json.loads(line)["event"] for line in file.read_text().splitlines()] == ["run.began"]


def test_a_log_on_a_full_disk_is_closed_in_silence() -> None:
    """What could not be written is still in its buffer."""
    log.configure(LogConfig(format="json"), service="trainer", file=Path("/dev/full"))
    structlog.get_logger().info("run.began")
    log.close_file()


def test_what_is_bound_is_on_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Also on those of threads that began before; what an event says itself comes first."""
    logger = structlog.get_logger()
    may_go = threading.Event()

    def work() -> None:
        may_go.wait()
        logger.info("thread.spoke")

    log.configure(LogConfig(format="json"), service="trainer", run="r")
    thread = threading.Thread(target=work)
    thread.start()
    log.bind(version=3)
    with structlog.contextvars.bound_contextvars(group="r/7"):
        logger.info("group.trained", version=2)
    may_go.set()
    thread.join()
    log.configure(LogConfig(format="json"), service="reward")
    logger.info("service.began")
    first, second, third = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (first["service"], first["run"], first["version"], first["group"]) == ("trainer", "r", 2, "r/7")
    assert (second["service"], second["run"], second["version"]) == ("trainer", "r", 3)
    assert (third["service"], "run" in third, "version" in third) == ("reward", False, False)
