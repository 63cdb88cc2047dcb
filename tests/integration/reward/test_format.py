"""Formats that a person configures, against responses made to hang them; and the table of the profiles' page."""

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.v1 import reward_pb2
from tests.support.reward.service import OK, reward_service
from tests.support.waiting import HANG_S


async def test_a_pattern_that_backtracks_hangs_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    """A worker matches it, within the item's deadline; when that passes, the response does not have the format."""
    settings = {"format_weight": 0.5, "format_pattern": r"(a+)+[\\]boxed\{5\}"}
    responses = {r"aaa\boxed{5}": 30.0, r"b\boxed{5}": 30.0, "a" * 60 + r"b\boxed{5}": 0.5}
    items = [
        reward_pb2.VerifyItem(golds=["5"], response=response, profile="math", deadline_s=deadline_s)
        for response, deadline_s in responses.items()
    ]
    async with reward_service(profiles={"math": settings}) as (client, _):
        verdicts = await client.verify_batch(items, timeout_s=HANG_S)
    assert [verdict.score for verdict in verdicts] == [1.0, 0.5, 0.5]
    assert {verdict.status for verdict in verdicts} == {OK}
    assert "format.failed" in capsys.readouterr().out


def test_the_table_of_the_profiles_is_current() -> None:
    """docs/reward/profiles.md says what the profiles say."""
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "tools.profile_table", "--check"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
