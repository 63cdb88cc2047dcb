"""Filters: which groups and samples are left out, what they cost, and when too much is left out."""

import math
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pydantic
import pytest
import torch

from penstock.errors import DataError
from penstock.records import Group
from services.recipe import Recipe
from services.trainer.admission.config import FilterConfig, doubts
from services.trainer.admission.filters import FilterReason, Screening, compression_ratio, screen
from services.trainer.admission.group_state import GroupCounts
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.presets import PRESETS
from services.trainer.backend.batch import Batch, make_batch
from services.trainer.batching.sequences import GroupReader, ModelTokens, TrainGroup
from services.trainer.flow.filter_tally import WINDOW, FilterTally, Interval
from services.trainer.telemetry.step_metrics import describe_filters, describe_groups
from tests.support.trainer.groups import make_group

OVERLONG = {"kind": "soft_overlong", "max_tokens": 100, "buffer_tokens": 20}
LOOP = "So the angle is 30 degrees. " * 400
"""What a policy says that does not find the end."""


def group_of(path: Path, *samples: dict[str, Any]) -> Group:
    """A group of samples with these fields: `reward`, None if unjudged, `finish_reason`, `text`."""
    group = make_group(path, rewards=[0.0] * len(samples))
    changed = [
        msgspec.structs.replace(sample, **({"verdict": None} | fields))
        for sample, fields in zip(group.samples, samples, strict=True)
    ]
    return msgspec.structs.replace(group, samples=tuple(changed))


def rewarded(path: Path, *rewards: float | None) -> Group:
    """A group with these rewards."""
    return group_of(path, *({"reward": reward} for reward in rewards))


def same(found: tuple[float, ...], wanted: tuple[float, ...]) -> bool:
    """Whether two tuples hold the same numbers and the same NaNs."""
    return np.array_equal(found, wanted, equal_nan=True)


def test_nothing_is_filtered_by_default(tiny_model_path: Path) -> None:
    """Equal rewards, cut answers and repetition are trained as they are."""
    group = group_of(
        tiny_model_path,
        {"reward": 1.0, "finish_reason": "length", "text": LOOP},
        {"reward": 1.0, "finish_reason": "deadline"},
        {"reward": None},
    )
    screening = screen(group, FilterConfig())
    assert (screening.reason, screening.kept, screening.masked) == (None, (0, 1, 2), (False,) * 3)
    assert same(screening.rewards, (1.0, 1.0, math.nan))


@pytest.mark.parametrize(
    ("rewards", "is_filtered"),
    [
        ((1.0, 1.0, 1.0), True),
        ((0.9, 0.9, 0.9), True),
        ((0.0, 0.0, 1.0), False),
        ((1.0, 1.0, None), True),
        ((0.0, 1.0, None), False),
        ((1.0, None, None), True),
        ((None, None, None), True),
        ((0.0, 1e-9, 0.0), False),
    ],
)
def test_groups_without_spread_are_filtered(
    tiny_model_path: Path, rewards: tuple[float | None, ...], is_filtered: bool
) -> None:
    """If all judged rewards are equal, exactly; a sample that was not judged makes no difference."""
    reason = screen(rewarded(tiny_model_path, *rewards), FilterConfig(zero_variance=True)).reason
    assert reason == (FilterReason.ZERO_VARIANCE if is_filtered else None)


@pytest.mark.parametrize("finish_reason", ["length", "deadline"])
def test_cut_samples_are_masked_or_score_nothing(tiny_model_path: Path, finish_reason: str) -> None:
    """Masked ones keep their reward, which others are compared with; a negative reward never rises to 0."""
    cut = {"finish_reason": finish_reason}
    group = group_of(
        tiny_model_path, {"reward": 0.5} | cut, {"reward": -1.0} | cut, {"reward": None} | cut, {"reward": 1.0}
    )
    masked = screen(group, FilterConfig(truncated="mask"))
    assert masked.masked == (True, True, True, False)
    assert same(masked.rewards, (0.5, -1.0, math.nan, 1.0))
    zeroed = screen(group, FilterConfig(truncated="zero"))
    assert zeroed.masked == (False,) * 4
    assert same(zeroed.rewards, (0.0, -1.0, math.nan, 1.0))


def test_other_ends_are_not_cuts(tiny_model_path: Path) -> None:
    """An environment that ends an episode, or fails, cuts no answer."""
    group = group_of(
        tiny_model_path, *({"reward": 1.0, "finish_reason": reason} for reason in ("stop", "environment", "error"))
    )
    assert screen(group, FilterConfig(truncated="mask")).masked == (False,) * 3


def test_filters_see_what_earlier_ones_left(tiny_model_path: Path) -> None:
    """Rewards that are equal once cut samples score nothing are no spread, nor is one that only masked samples have."""
    half = group_of(tiny_model_path, {"reward": 1.0, "finish_reason": "length"}, {"reward": 0.0}, {"reward": 0.0})
    assert screen(half, FilterConfig(zero_variance=True)).reason is None
    assert screen(half, FilterConfig(zero_variance=True, truncated="zero")).reason is FilterReason.ZERO_VARIANCE
    assert screen(half, FilterConfig(zero_variance=True, truncated="mask")).reason is None, "others learn from it"
    cut = group_of(tiny_model_path, *({"reward": reward, "finish_reason": "length"} for reward in (1.0, 0.0)))
    assert screen(cut, FilterConfig(zero_variance=True, truncated="mask")).reason is FilterReason.ZERO_VARIANCE


def test_repetition_is_found_by_compression() -> None:
    """A loop is far above the bound, whatever came before it; mathematics and random text are far below."""
    words = ["the", "angle", "bisector", "meets", "side", "at", "point", "so", "triangle", "similar", "therefore"]
    rng = random.Random(0)
    prose = " ".join(rng.choice(words) + str(rng.randrange(1000)) for _ in range(3000))
    assert compression_ratio(LOOP) > 50
    assert compression_ratio(prose + LOOP) > 50
    assert 1.5 < compression_ratio(prose) < 4
    assert compression_ratio("\\boxed{30}") < 1
    assert compression_ratio("") == 0
    assert compression_ratio("\ud800" * 500) > 10, "half a character is text too"


def test_samples_that_repeat_are_masked_or_dropped(tiny_model_path: Path) -> None:
    """A group with fewer than two samples left has nothing to compare."""
    loop = {"reward": 0.0, "text": LOOP}
    group = group_of(tiny_model_path, {"reward": 1.0, "text": "30"}, loop, {"reward": 0.0, "text": "31"})
    masked = screen(group, FilterConfig(repetition="mask"))
    assert (masked.kept, masked.masked) == ((0, 1, 2), (False, True, False))
    dropped = screen(group, FilterConfig(repetition="drop"))
    assert (dropped.reason, dropped.kept, dropped.rewards) == (None, (0, 2), (1.0, 0.0))
    high = FilterConfig(repetition="drop", max_compression_ratio=1000.0)
    assert screen(group, high).kept == (0, 1, 2)
    loops = group_of(tiny_model_path, {"reward": 1.0}, loop, loop)
    assert screen(loops, FilterConfig(repetition="drop", zero_variance=True)).reason is FilterReason.REPETITION


def test_affected_samples_are_counted_by_filter(tiny_model_path: Path) -> None:
    """For every filter that changed it, which zeroing a reward of 0 does not; one that is dropped for that alone."""
    group = group_of(
        tiny_model_path,
        {"reward": 1.0, "finish_reason": "length"},
        {"reward": 0.0, "finish_reason": "deadline"},
        {"reward": 1.0, "finish_reason": "length", "text": LOOP},
        {"reward": 1.0, "text": LOOP},
    )

    def affected(**settings: str) -> dict[str, int]:
        counts = screen(group, FilterConfig.model_validate(settings)).affected
        return {name: count for name, count in counts.items() if count}

    assert affected() == {}
    assert affected(truncated="mask", repetition="mask") == {"truncated_masked": 3, "repetition_masked": 2}
    assert affected(truncated="zero") == {"truncated_zeroed": 2}
    assert affected(truncated="zero", repetition="drop") == {"truncated_zeroed": 1, "repetition_dropped": 2}


def batch_of(path: Path, screening: Screening, **algorithm: Any) -> Batch:
    """A batch of the screened group of four and one more of 4 tokens in all."""
    reader = GroupReader(ModelTokens(vocab_size=512, image_id=None, forbidden_ids=frozenset()), None)
    first = make_group(path, rewards=[0.0] * 4, own_lengths=[1, 2, 3, 10])
    second = make_group(path, index=1, rewards=[1.0, 0.0], own_lengths=[2, 2])
    groups = [reader.read(first, {}).screened(screening), reader.read(second, {})]
    return make_batch(
        groups,
        (),
        algorithm=AlgorithmConfig.model_validate(algorithm),
        entropy_coef=0.0,
        version=1,
        device=torch.device("cpu"),
    )


LAST_MASKED = Screening(
    reason=None, kept=(0, 1, 2, 3), rewards=(1.0, 0.0, 0.0, 0.0), masked=(False, False, False, True), affected={}
)


def test_a_masked_sample_counts_but_has_no_gradient(tiny_model_path: Path) -> None:
    """By hand: its reward is in the mean of 1/4, its 10 tokens in the denominator of 20; its own weight is 0."""
    batch = batch_of(tiny_model_path, LAST_MASKED, advantage={"kind": "dr_grpo"}, drift=0.1)
    assert batch.samples.advantages_G.tolist() == pytest.approx([0.75, -0.25, -0.25, 0.0, 0.5, -0.5])
    assert batch.samples.weights_G.tolist() == pytest.approx([0.05, 0.05, 0.05, 0.0, 0.05, 0.05])
    assert batch.with_gradient == [0, 1, 2, 4, 5], "not even a penalty on its tokens is trained"


def test_a_masked_sample_has_no_gradient_from_rewards_of_tokens(tiny_model_path: Path) -> None:
    """Where advantages are the tokens', it is left out of them as a sample without a reward is."""
    batch = batch_of(tiny_model_path, LAST_MASKED, kl={"kind": "k1_in_reward"}, advantage={"kind": "reinforce_pp"})
    assert batch.samples.eligible_G.tolist() == [True, True, True, False, True, True]
    assert batch.has_advantage_G.tolist() == batch.samples.eligible_G.tolist()
    assert batch.samples.weights_G[3] == 0


def test_a_dropped_sample_counts_nowhere(tiny_model_path: Path) -> None:
    """By hand: the mean is of three rewards, the denominator of 10 tokens."""
    dropped = Screening(reason=None, kept=(0, 1, 2), rewards=(1.0, 0.0, 0.0), masked=(False,) * 3, affected={})
    batch = batch_of(tiny_model_path, dropped, advantage={"kind": "dr_grpo"})
    assert batch.samples.advantages_G.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0.5, -0.5])
    assert batch.samples.weights_G.tolist() == pytest.approx([0.1] * 5)


def test_too_large_a_filtered_share_ends_the_run() -> None:
    """Of the last 256 groups, not one before there are 256; the error has the counts and the remedy."""
    tally = FilterTally(max_share=0.9)
    for _ in range(26):
        tally.keep([0.0, 1.0])
    for number in range(WINDOW - 26):
        tally.filter_out(FilterReason.ZERO_VARIANCE if number % 5 else FilterReason.OVERLONG_PROMPT)
    with pytest.raises(
        DataError,
        match=r"231 of the last 256 groups were filtered \(zero_variance 185, overlong_prompt 46\), more than "
        r"filters\.max_filtered_share = 0\.9; .*samples_per_group",
    ):
        tally.filter_out(FilterReason.ZERO_VARIANCE)


def test_a_share_of_one_never_ends_the_run() -> None:
    """For a person who would rather wait."""
    tally = FilterTally(max_share=1.0)
    for _ in range(3 * WINDOW):
        tally.filter_out(FilterReason.ZERO_VARIANCE)


def test_metrics_count_what_the_filters_did(tiny_model_path: Path) -> None:
    """Between two steps: share and reward of all that arrived; of the batch: samples masked and dropped."""
    tally = FilterTally(max_share=1.0)
    tally.keep([1.0, 0.0, None])
    tally.filter_out(FilterReason.ZERO_VARIANCE, [1.0, 1.0, 1.0])
    tally.filter_out(FilterReason.OVERLONG_PROMPT)
    since = tally.take()
    played = rewarded(tiny_model_path, 1.0, 0.0, None)
    reader = GroupReader(ModelTokens(vocab_size=512, image_id=None, forbidden_ids=frozenset()), None)
    screening = Screening(reason=None, kept=(0, 2), rewards=(1.0, math.nan), masked=(True, False), affected={})
    ready: TrainGroup = reader.read(played, {}).screened(screening)
    assert describe_filters([played], [ready], since) == {
        "num_masked_samples": 1,
        "num_dropped_samples": 1,
        "filtered_group_fraction": 2 / 3,
        "reward_mean_played": 0.8,
    }
    assert tally.take() == Interval(num_groups=0, num_filtered=0, rewards=())
    assert describe_filters([], [], tally.take())["filtered_group_fraction"] == 0
    counts = GroupCounts(filtered=3, filtered_tokens=99, filtered_by_reason={"zero_variance": 2, "repetition": 1})
    counts.affected["truncated_zeroed"] = 5
    described = describe_groups(counts, num_duplicate=0, num_unreadable=0)
    assert {name: value for name, value in described.items() if "samples" in name} == {
        "num_samples_truncated_masked": 0,
        "num_samples_truncated_zeroed": 5,
        "num_samples_repetition_masked": 0,
        "num_samples_repetition_dropped": 0,
    }
    assert {name: value for name, value in described.items() if "filtered" in name} == {
        "num_filtered_groups": 3,
        "num_filtered_tokens": 99,
        "num_filtered_groups_zero_variance": 2,
        "num_filtered_groups_repetition": 1,
        "num_filtered_groups_overlong_prompt": 0,
        "num_filtered_groups_wrong_row": 0,
        "num_filtered_groups_easy_pool": 0,
        "num_filtered_groups_hard_pool": 0,
    }


def test_refuses_an_estimator_that_learns_from_groups_without_spread() -> None:
    """REINFORCE++ compares with the batch, so that such groups teach it."""
    with pytest.raises(pydantic.ValidationError, match=r"filters\.zero_variance = true .* 'reinforce_pp' compares"):
        Recipe.model_validate(
            {"filters": {"zero_variance": True}, "algorithm": {"advantage": {"kind": "reinforce_pp"}}}
        )
    Recipe.model_validate({"algorithm": {"advantage": {"kind": "reinforce_pp"}}})


@pytest.mark.parametrize(
    ("filters", "algorithm", "doubt"),
    [
        ({"zero_variance": True}, {"kl": {"kind": "k3"}}, "KL, drift and entropy"),
        ({"zero_variance": True}, {"entropy": {"kind": "target"}}, "KL, drift and entropy"),
        ({"zero_variance": True}, {"advantage": {"kind": "custom", "function": "a:b"}}, "function = 'a:b'"),
        (
            {"truncated": "mask"},
            {"advantage": {"kind": "dr_grpo", "length_penalty": {"kind": "linear"}}},
            "kind = 'linear' penalises",
        ),
        (
            {},
            {"advantage": {"kind": "reinforce_pp_baseline", "length_penalty": OVERLONG}},
            "teaches as much as right and wrong in a batch whose rewards are all equal",
        ),
        (
            {},
            {"advantage": {"kind": "reinforce_pp", "length_penalty": OVERLONG}},
            "over the batch; set algorithm.advantage.norm = 'none' with kind = 'dr_grpo'",
        ),
        (
            {},
            {"preset": "cispo", "advantage": {"length_penalty": {"kind": "linear"}}},
            "set filters.zero_variance = true",
        ),
        ({}, {"trust_region": {"kind": "clip"}}, "'clip' never acts with anchor = 'proximal'"),
        ({}, {"preset": "ppo", "anchor": "proximal"}, "'clip' never acts with anchor = 'proximal'"),
        ({}, {"preset": "rlinf_geo3k", "trust_region": {"kind": "cispo"}}, "'cispo' never acts"),
        (
            {},
            {"ratio": "sequence", "aggregation": {"kind": "sequence"}, "correction": {"level": "sequence"}},
            "ratio = 'sequence' has no effect with anchor = 'proximal'",
        ),
        ({}, {"anchor": "log_linear", "correction": {"kind": "none"}}, "is the engine's log-probability; set"),
    ],
)
def test_says_what_may_not_be_meant(filters: dict[str, Any], algorithm: dict[str, Any], doubt: str) -> None:
    """Settings that work together, but not as a person might expect."""
    axes = AlgorithmConfig.model_validate(algorithm)
    (found,) = doubts(FilterConfig.model_validate(filters), axes, max_staleness=0)
    assert doubt in found
    assert [preset for preset in PRESETS if doubts_of(preset, max_staleness=0)] == ["decoupled_ppo"]


def test_a_ratio_that_filters_nothing_is_refused() -> None:
    """A person who sets it expects repetition to be left out."""
    with pytest.raises(pydantic.ValidationError, match="max_compression_ratio = 3 has no effect with repetition = 'k"):
        FilterConfig(max_compression_ratio=3)
    assert FilterConfig(max_compression_ratio=3, repetition="mask").max_compression_ratio == 3


def test_says_that_stale_tokens_have_no_correction() -> None:
    """Of the presets, only slime's needs a policy without staleness; another anchor or a correction answers it."""
    found = {preset: doubts_of(preset, max_staleness=2) for preset in PRESETS}
    assert [preset for preset, each in found.items() if each] == ["slime_geo3k"]
    assert "trainer.max_staleness = 2 trains tokens of earlier versions" in found["slime_geo3k"][0]
    corrected = {"correction": {"kind": "truncate"}}
    assert "max_staleness" not in "".join(doubts_of("slime_geo3k", max_staleness=2, **corrected))


def test_says_that_an_anchor_of_one_version_back_needs_older_tokens_and_a_correction() -> None:
    """Up to a staleness of 1, the default, it is the engine and the correction idle; beyond, tokens need the latter."""
    for max_staleness in (0, 1):
        (idle,) = doubts_of("decoupled_ppo", max_staleness=max_staleness)
        assert f"trainer.max_staleness = {max_staleness} it is the engine's log-probability, and the correction" in idle
    assert doubts_of("decoupled_ppo", max_staleness=2) == []
    (missing,) = doubts_of("decoupled_ppo", max_staleness=2, correction={"kind": "none"})
    assert "algorithm.anchor = 'log_linear' without a correction" in missing


def doubts_of(preset: str, *, max_staleness: int, **axes: Any) -> list[str]:
    """What is doubted about a preset with these axes changed, without filters."""
    algorithm = AlgorithmConfig.model_validate({"preset": preset, **axes})
    return doubts(FilterConfig(), algorithm, max_staleness=max_staleness)
