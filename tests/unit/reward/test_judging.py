"""The profiles by name, as the settings make them, and the words of verdicts."""

import tracemalloc

import pytest

from penstock.errors import InvalidRequestError
from penstock.v1 import reward_pb2
from penstock.verdict_status import Status
from services.reward.config import RewardConfig
from services.reward.item import Item
from services.reward.profiles.registry import find_profile, make_profiles
from services.reward.verdict import Finding, Method
from tests.support.calls import num_calls

_PROFILES = make_profiles(RewardConfig())


def test_the_settings_of_value_equality_reach_the_profiles() -> None:
    """geo3k without its tolerance is math."""
    profile = make_profiles(RewardConfig.model_validate({"geo3k_tolerance": 0.0}))["geo3k"]
    item = Item(golds=["8.5"], response=r"\boxed{8.51}", profile="geo3k")
    finding, wider = profile.decide(item), _PROFILES["geo3k"].decide(item)
    assert isinstance(finding, Finding)
    assert isinstance(wider, Finding)
    assert (finding.credit, wider.credit) == (0, 1)


@pytest.mark.parametrize("name", sorted(_PROFILES))
@pytest.mark.parametrize(
    "golds", [["5"] * 65, ["\\boxed{" + "{" * 5_000_000], ["yes " * 2_000_000]], ids=["many", "braces", "words"]
)
def test_more_gold_answers_than_can_be_read_at_once_are_invalid(name: str, golds: list[str]) -> None:
    """They are refused unread, so whoever sends them does not hold up the event loop."""
    item = Item(golds=golds, response=r"</think> Answer: 5, \boxed{5}", profile=name)
    assert num_calls(lambda: _PROFILES[name].decide(item)) < 100
    tracemalloc.start()
    finding = _PROFILES[name].decide(item)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10_000, "a gold answer was copied or taken apart"
    assert isinstance(finding, Finding)
    assert finding.status is Status.GOLD_INVALID


def test_an_unknown_profile_names_the_known_ones() -> None:
    """The error says what can be asked for."""
    with pytest.raises(InvalidRequestError, match=r"'maths' is unknown; known: dapo, .*geo3k, .*math, "):
        find_profile(_PROFILES, "maths")


def test_statuses_and_methods_are_the_contracts() -> None:
    """Each word of ours is one of the contract's, and the other way round."""
    statuses = {name.removeprefix("VERDICT_STATUS_") for name in reward_pb2.VerdictStatus.keys()}  # noqa: SIM118 - no dict
    methods = {name.removeprefix("VERDICT_METHOD_") for name in reward_pb2.VerdictMethod.keys()}  # noqa: SIM118 - no dict
    assert set(Status) == statuses - {"UNSPECIFIED"}
    assert set(Method) == methods
