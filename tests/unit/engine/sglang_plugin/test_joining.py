"""Process groups that SGLang comes to too late."""

import time
from typing import Any

import pytest

from services.rollout.engine.sglang_plugin import hooks
from services.rollout.engine.sglang_plugin.variables import name_to_join


def join(_updater: object, *args: Any) -> tuple[bool, str]:
    """SGLang's own, which forms the group with this name."""
    return True, args[4]


@pytest.mark.parametrize("is_timed", [True, False])
def test_a_group_that_is_waited_for_is_joined_under_its_own_name(is_timed: bool) -> None:
    """Also one that Penstock did not name."""
    given = name_to_join("weights-1", before=time.monotonic() + 600.0) if is_timed else "weights-1"
    assert hooks._join_group(join, None, "127.0.0.1", 1, 1, 2, given, "gloo") == (True, "weights-1")


def test_a_group_that_is_no_longer_waited_for_is_refused() -> None:
    """At once, instead of after all of gloo's attempts to reach its members."""
    late = name_to_join("weights-1", before=time.monotonic())
    joined, reason = hooks._join_group(join, None, "127.0.0.1", 1, 1, 2, late, "gloo")
    assert not joined
    assert "weights-1 too late" in reason
