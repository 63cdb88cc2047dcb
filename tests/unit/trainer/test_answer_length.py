"""Length penalties that no answer of the recipe can reach are refused, and those that few reach are doubted."""

import math
from typing import Any

import pydantic
import pytest

from penstock.config import SamplingConfig
from services.recipe import Recipe
from services.trainer.algorithm.axes import LengthPenaltyConfig
from services.trainer.checks.answer_length import most_own_tokens, penalty_doubt
from services.trainer.data.config import DataConfig

PENALTY = {"kind": "soft_overlong", "max_tokens": 2048, "buffer_tokens": 512}


def recipe(**sections: Any) -> Recipe:
    """One with the penalty, which begins above 1,536 tokens."""
    return Recipe.model_validate({"algorithm": {"advantage": {"length_penalty": PENALTY}}, **sections})


@pytest.mark.parametrize(
    ("data", "most"),
    [
        ({}, 100),
        ({"limits": {"max_tokens": 80}}, 80),
        ({"limits": {"max_turns": 4}}, 100),
        ({"environment": "geo3k_zoom"}, 1000),
        ({"environment": "geo3k_zoom", "limits": {"max_turns": 3}}, 300),
        ({"environment": "geo3k_zoom", "limits": {"max_turns": 3}, "limits_column": "limits"}, 1000),
        ({"limits_column": "limits", "limits": {"max_tokens": 80}}, 100),
        ({"environment_column": "environment"}, 1000),
        ({"environment_column": "environment", "limits": {"max_turns": 2}}, 200),
        ({"sampling_column": "sampling"}, 100),
        ({"sources": {"a": {"path": "a.jsonl"}, "b": {"path": "b.jsonl", "environment": "geo3k_zoom"}}}, 1000),
        ({"sources": {"a": {"path": "a.jsonl", "limits": {"max_tokens": 50}}, "b": {"path": "b.jsonl"}}}, 100),
    ],
    ids=str,
)
def test_the_longest_answer_by_sources_turns_and_limits(data: dict[str, Any], most: int) -> None:
    """Of 100 tokens a turn in a context of 1,000: one turn of single_turn, else as limits say; rows can have others."""
    sampling = SamplingConfig(max_new_tokens=100)
    assert most_own_tokens(DataConfig.model_validate(data), sampling, context_length=1000) == most


def test_nothing_known_bounds_a_conversation_in_the_models_own_context() -> None:
    """Its length is not in the recipe."""
    found = most_own_tokens(DataConfig(environment="geo3k_zoom"), SamplingConfig(), context_length=0)
    assert found == math.inf


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"sampling": {"max_new_tokens": 1536}},
        {"sampling": {"max_new_tokens": 4096}, "rollout": {"context_length": 1024}},
        {"data": {"environment": "geo3k_zoom", "limits": {"max_turns": 3}}},
    ],
    ids=str,
)
def test_refuses_a_penalty_that_no_answer_reaches(sections: dict[str, Any]) -> None:
    """With both settings: at 1,536 tokens the penalty is still 0."""
    with pytest.raises(
        pydantic.ValidationError,
        match=r"max_tokens = 2048 with buffer_tokens = 512 .* 1536 tokens, but sampling\.max_new_tokens = .* never",
    ):
        recipe(**sections)


@pytest.mark.parametrize(
    "sections",
    [
        {"sampling": {"max_new_tokens": 1537}},
        {"data": {"environment": "geo3k_zoom"}},
        {"worker": {"environments": {"single_turn": "mine:Talk"}}},
        {"algorithm": {}},
    ],
    ids=str,
)
def test_takes_a_penalty_that_some_answer_can_reach(sections: dict[str, Any]) -> None:
    """Also where an environment of the user's own has the built-in one's name."""
    recipe(**sections)


def test_doubts_a_penalty_that_is_never_full() -> None:
    """By the share of it that the longest answer loses."""
    penalty = LengthPenaltyConfig.model_validate(PENALTY)
    assert penalty_doubt(penalty, 1664).endswith("the longest lose 25% of overlong_factor at most")
    assert penalty_doubt(penalty, 2048) == penalty_doubt(penalty, math.inf) == ""
    assert penalty_doubt(LengthPenaltyConfig(), 10) == ""
