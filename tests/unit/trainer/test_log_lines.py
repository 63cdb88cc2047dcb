"""What every line of the trainer's log names while it trains."""

import asyncio
import json
from pathlib import Path

import structlog

from penstock.config import LogConfig
from penstock.telemetry import log
from tests.support.trainer.runs.gated_loop import running


async def test_a_line_names_the_version_of_the_trainer_s_weights(tmp_path: Path) -> None:
    """From the start of the loop, and the next one from the update on."""
    file = tmp_path / "trainer.log"
    log.configure(LogConfig(format="json"), service="trainer", file=file)
    logger = structlog.get_logger()
    async with running(tmp_path, feed=asyncio.Event().wait) as run:
        run.checkpoints.on_disk.set()
        for first in (0, 4):
            run.finish(*range(first, first + 4))
            for call in ([*range(first, first + 4)], "finish_step"):
                assert await run.backend.next_call() == call
                logger.info("test.spoke")
                run.backend.go_on()
    log.close_file()
    lines = map(json.loads, file.read_text().splitlines())
    assert [line["version"] for line in lines if line["event"] == "test.spoke"] == [1, 1, 2, 2]
