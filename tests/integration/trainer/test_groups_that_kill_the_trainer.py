"""Groups that kill the trainer's process: given up after three deaths, so that the run goes on."""

import asyncio
import json
import re
import signal
import sys
from pathlib import Path

import pytest

from penstock.bus.connection import Bus
from penstock.bus.stored.dead_letters import list_letters
from penstock.config import BusConfig
from penstock.errors import DataError, InvalidRequestError
from penstock.records.codec import encode
from services.trainer.flow.crash_record import MAX_DEATHS, CrashRecord
from tests.conftest import ROOT
from tests.support.trainer.groups import make_group
from tests.support.trainer.runs.dying_trainer import NUM_GROUPS


async def start_trainer(*arguments: object) -> list[str]:
    """The last two lines that `tests.support.trainer.runs.dying_trainer` prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.support.trainer.runs.dying_trainer", *map(str, arguments)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    return output.decode().splitlines()[-2:]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "given_up", "batch"), [("reading", [0], [1, 2]), ("training", [0, 1], [2, 3])])
async def test_a_group_that_kills_the_trainer_is_given_up(
    bus: Bus,
    bus_config: BusConfig,
    run_name: str,
    tiny_model_path: Path,
    tmp_path: Path,
    mode: str,
    given_up: list[int],
    batch: list[int],
) -> None:
    """Each start finds it on the bus again; after three deaths it is buried with the reason and the next are trained.

    Of a batch, nobody can say which group it was: all are given up, and the whole death counts as no failure in a row.
    """
    for index in range(NUM_GROUPS):
        group = make_group(tiny_model_path, index=index, version=1)
        await bus.publish(bus.groups, encode(group), message_id=group.id.message)
    trained, codes = await start_trainer(bus_config.url, run_name, tmp_path, mode, MAX_DEATHS + 1)
    assert json.loads(codes) == [-signal.SIGKILL] * MAX_DEATHS + [0]
    assert json.loads(trained) == {"batch": batch, "num_failed": len(given_up)}
    letters = await list_letters(bus)
    assert [letter.message_id for letter in letters] == [f"run/{index}/0/a" for index in given_up]
    assert re.search(
        rf"the trainer died {MAX_DEATHS} times while it (read|trained the batch with) group 0", letters[0].reason
    )


@pytest.mark.slow
async def test_a_half_filled_batch_is_trained_after_a_restart(
    bus: Bus, bus_config: BusConfig, run_name: str, tiny_model_path: Path, tmp_path: Path
) -> None:
    """A trainer is killed when it has computed one of two groups and waits for the other: both are trained, once.

    The group that was computed is no suspect: it was not in hand.
    """
    for index, start in enumerate(("killed", "resumed")):
        group = make_group(tiny_model_path, index=index, version=1)
        await bus.publish(bus.groups, encode(group), message_id=group.id.message)
        *lines, codes = await start_trainer(bus_config.url, run_name, tmp_path, "waiting", 1)
        assert json.loads(codes) == [-signal.SIGKILL if start == "killed" else 0]
        assert not json.loads((tmp_path / "in_hand.json").read_text())["training"]["in_hand"]
    assert json.loads(lines[0]) == {"batch": [0, 1], "num_failed": 0}
    assert open_record(tmp_path / "in_hand.json").why_given_up(0) is None


def open_record(file: Path, *, run_id: str = "run", is_resumed: bool = True) -> CrashRecord:
    """The record of a run that goes on, unless told otherwise."""
    return CrashRecord(file, run_id=run_id, is_resumed=is_resumed)


def test_only_groups_in_hand_at_a_death_are_suspect(tmp_path: Path) -> None:
    """Those that were read, refused or trained before are not; two may be in hand at the same time."""
    file = tmp_path / "in_hand.json"
    for _ in range(MAX_DEATHS):
        crashes = open_record(file)
        with crashes.reading(1):
            pass
        with pytest.raises(InvalidRequestError), crashes.reading(2):
            raise InvalidRequestError
        with crashes.training([3, 4]):
            pass
        crashes.training([5, 6]).__enter__()  # and dies
        crashes.reading(7).__enter__()
    assert [index for index in range(9) if open_record(file).why_given_up(index)] == [5, 6, 7]


def test_a_group_that_was_read_or_trained_is_suspect_no_longer(tmp_path: Path) -> None:
    """Deaths of other causes, far apart, do not add up; and a group that can be read may still kill when trained."""
    file = tmp_path / "in_hand.json"
    for _ in range(MAX_DEATHS - 1):
        open_record(file).training([1, 2]).__enter__()
        open_record(file).reading(3).__enter__()
    crashes = open_record(file)
    for index in (1, 2, 3):
        with crashes.reading(index):
            pass
    with crashes.training([1, 2]):
        pass
    with crashes.updating([1]):
        pass
    open_record(file).training([1, 2]).__enter__()
    open_record(file).reading(3).__enter__()
    assert [index for index in (1, 2, 3) if open_record(file).why_given_up(index)] == [2]


def test_a_crash_that_raises_counts_as_a_death(tmp_path: Path) -> None:
    """As when a GPU has no memory left: the process ends, and the next one meets the same group."""
    file = tmp_path / "in_hand.json"
    for _ in range(MAX_DEATHS):
        with pytest.raises(MemoryError), open_record(file).training([1]):
            raise MemoryError
    assert open_record(file).why_given_up(1)


def test_an_update_that_kills_is_found_although_its_groups_were_computed(tmp_path: Path) -> None:
    """Each start computes the gradient of the same groups, and dies when it updates the weights."""
    file = tmp_path / "in_hand.json"
    for _ in range(MAX_DEATHS):
        crashes = open_record(file)
        with crashes.training([1, 2]):
            pass
        with pytest.raises(MemoryError), crashes.updating([1, 2]):
            raise MemoryError
    crashes = open_record(file)
    assert [index for index in (1, 2) if crashes.why_given_up(index)] == [1, 2]
    with pytest.raises(DataError, match="died 3 times in a row"):
        crashes.require_progress(2)


def test_deaths_without_a_step_end_the_run(tmp_path: Path) -> None:
    """Too many in a row are a fault of the set-up, not of a group; who has mended it may start again."""
    file = tmp_path / "in_hand.json"
    for index in range(3):
        crashes = open_record(file)
        crashes.require_progress(2)
        crashes.training([index]).__enter__()
    with pytest.raises(DataError, match=r"died 3 times in a row .*more than 2; at last with groups \[2\]"):
        open_record(file).require_progress(2)
    crashes = open_record(file)
    crashes.require_progress(2)
    with crashes.training([4]):
        pass
    with crashes.updating([4]):
        pass
    crashes.training([5]).__enter__()
    open_record(file).require_progress(1)


@pytest.mark.parametrize("content", ["", "[1]", '{"reading": '])
def test_a_damaged_record_is_begun_anew(tmp_path: Path, content: str) -> None:
    """It must not keep a run from going on."""
    file = tmp_path / "in_hand.json"
    file.write_text(content)
    with open_record(file).training([1]):
        pass
    nobody: dict[str, object] = {"in_hand": [], "deaths": {}}
    assert json.loads(file.read_text()) == {
        "reading": nobody,
        "training": nobody,
        "num_deaths_in_a_row": 0,
        "run_id": "run",
    }


def test_a_new_run_in_an_old_folder_begins_without_suspects(tmp_path: Path) -> None:
    """Its groups have the same numbers and other contents; the old run had given up one of them, and then ended."""
    file = tmp_path / "in_hand.json"
    for _ in range(MAX_DEATHS):
        open_record(file).training([1]).__enter__()
    assert open_record(file).why_given_up(1)
    assert open_record(file, run_id="new", is_resumed=False).why_given_up(1) is None


def test_a_run_that_dies_before_its_first_checkpoint_keeps_its_suspects(tmp_path: Path) -> None:
    """It begins anew each time, under another id, and meets the same groups."""
    file = tmp_path / "in_hand.json"
    for start in range(MAX_DEATHS):
        open_record(file, run_id=f"start-{start}", is_resumed=False).training([1]).__enter__()
    assert open_record(file, run_id="last", is_resumed=False).why_given_up(1)


def test_a_record_of_another_run_says_nothing_of_a_resumed_one(tmp_path: Path) -> None:
    """Its folder was copied, or its checkpoints were restored."""
    file = tmp_path / "in_hand.json"
    for _ in range(MAX_DEATHS):
        open_record(file, run_id="other").training([1]).__enter__()
    assert open_record(file).why_given_up(1) is None
