"""The scales of the profiles and the formats that count, and settings that cannot be."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import load
from penstock.errors import ConfigError
from penstock.verdict_status import Status
from services.reward.config import RewardConfig
from services.reward.isolation.tasks import FormatTask
from services.reward.item import Item
from services.reward.profiles.custom import find_verifiers
from services.reward.profiles.format import Format
from services.reward.profiles.registry import make_profiles
from services.reward.verdict import Finding

_BUILT_IN = {"math", "geo3k", "slime_math", "deepscaler", "dapo", "verl_geo3k", "math_verify", "f1", "gpqa", "mcq"}


def score(profile: str, response: str, **settings: object) -> float:
    """The score of a response that takes no worker, with these settings of the profile; the gold answer is 5."""
    made = make_profiles(RewardConfig.model_validate({"profiles": {profile: settings}}))[profile]
    finding = made.decide(Item(golds=["5"], response=response, profile=profile))
    assert isinstance(finding, Finding)
    has_format = made.scoring.check_format(finding, response)
    assert isinstance(has_format, bool)
    return made.scoring.score(finding, has_format=has_format)


def test_scales_by_default_are_the_originals() -> None:
    """0 and 1; for dapo -1 and 1; verl_geo3k gives 0.9 for the answer and 0.1 for the format."""
    assert score("math", r"\boxed{5}") == 1.0
    assert score("math", "?") == 0.0
    assert score("dapo", "Answer: 5") == 1.0
    assert score("dapo", "Answer: 6") == score("dapo", "?") == -1.0
    assert score("verl_geo3k", r"\boxed{5}") == pytest.approx(0.9)
    assert score("verl_geo3k", r"<think></think>\boxed{5}") == pytest.approx(1.0)
    assert score("verl_geo3k", "?") == 0.0


def test_a_scale_is_set_in_part() -> None:
    """What is given changes; what is not stays the profile's own."""
    assert score("dapo", "Answer: 6", reward_max=2) == -1.0
    assert score("dapo", "Answer: 5", reward_max=2) == 2.0
    assert score("verl_geo3k", r"\boxed{5}", format_weight=0) == 1.0
    assert score("verl_geo3k", r"<think></think>\boxed{5}", format_weight=0.5, reward_max=10) == 10.0
    assert score("math", "<a>5", format_weight=0.25, format_pattern="<a>.*") == 0.25
    assert score("math", r"\boxed{5}", format_weight=0.25, format_pattern="<a>.*") == 0.75
    assert score("math", r"\boxed{5}", format_weight=0, format_pattern="<a>.*") == 1.0
    assert score("math", r"\boxed{5}", reward_max=0, reward_min=1) == 0.0


@pytest.mark.parametrize("ending", ["", "<|im_end|>", "</s>\n<|endoftext|>\n"])
def test_a_pattern_of_yours_sees_no_end_of_text_token(ending: str) -> None:
    """slime sends them by default. A profile that imitates slime sees them, as slime does."""
    settings = {"format_weight": 0.25, "format_pattern": r".*\}"}
    for profile in ("math", "geo3k"):
        assert score(profile, r"\boxed{6}" + ending, **settings) == 0.25
    assert score("slime_math", r"\boxed{5}" + ending, **settings) == (0.75 if ending else 1.0)
    custom = make_profiles(RewardConfig.model_validate({"profiles": {"mine": settings}}), {"mine": "mine.py:verify"})[
        "mine"
    ]
    assert custom.scoring.check_format(Finding(status=Status.OK), r"\boxed{6}" + ending) is True


def test_a_worker_sees_no_end_of_text_token_either() -> None:
    """Whatever the pattern, and also at the end of a response that is cut for it."""
    made = Format("^[<]a.*z$", max_chars=10, drops_end_of_text=True)
    assert made.check("<a..z<|im_end|>") == FormatTask(pattern="^[<]a.*z$", text="<a..z")
    assert made.check("<aaaaaa" + "-" * 100 + "zzzzzz<|im_end|>\n") == FormatTask(
        pattern="^[<]a.*z$", text="<aaaazzzzz"
    )


def test_what_could_not_be_judged_earns_nothing_by_its_format() -> None:
    """A fault of the data or of the service is not the policy's merit."""
    scoring = make_profiles(RewardConfig())["verl_geo3k"].scoring
    for status in (Status.GOLD_INVALID, Status.TIMEOUT, Status.OUT_OF_MEMORY, Status.FAILED):
        finding = Finding(status=status)
        assert scoring.check_format(finding, r"<think></think>\boxed{5}") is False
        assert scoring.score(finding, has_format=True) == 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"profiles": {"maths": {}}}, r"\[reward.profiles.maths\].*known: .*geo3k, .*math, "),
        ({"profiles": {"remote": {}}}, r"set reward.remote.url"),
        (
            {"profiles": {"math": {"format_weight": 0.1}}},
            r"reward.profiles.math.format_weight = 0.1.*give format_pattern",
        ),
        (
            {"profiles": {"math": {"format_pattern": "<a>.*"}}},
            r"reward.profiles.math.format_pattern = '<a>\.\*' has no effect .* give format_weight too",
        ),
        (
            {"profiles": {"dapo": {"reward_max": -1}}},
            r"reward.profiles.dapo.reward_max = -1 is its reward_min too.*give another reward_max or reward_min",
        ),
        (
            {"profiles": {"dapo": {"answers_in": "box"}}},
            r"reward.profiles.dapo.answers_in = 'box': this profile finds answers in its own way; remove it",
        ),
        ({"verifiers": {"math": "a.py:b"}}, r"custom verifier math = 'a.py:b' has the name of a built-in profile"),
        ({"verifiers": {"remote": "a.py:b"}}, r"custom verifier remote = .*built-in"),
    ],
)
def test_settings_that_fit_no_profile_are_named(settings: dict[str, object], message: str) -> None:
    """The message names the section, the value and what there is."""
    config = RewardConfig.model_validate(settings)
    with pytest.raises(ConfigError, match=message):
        make_profiles(config, find_verifiers(config.verifiers))


def test_a_pattern_that_is_none_is_an_error_of_the_settings(tmp_path: Path) -> None:
    """It shows when the recipe is read, with its key and the reason."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[profiles.math]\nformat_weight = 0.1\nformat_pattern = '(<think>'\n")
    with pytest.raises(
        ConfigError, match=r"profiles.math.format_pattern = '\(<think>': is not a regular expression: missing \)"
    ):
        load(RewardConfig, [recipe])


def test_profiles_and_what_they_say_of_themselves() -> None:
    """Each is described in a sentence; `remote` is there with a URL only, a custom verifier under its name."""
    profiles = make_profiles(RewardConfig())
    assert set(profiles) == _BUILT_IN
    assert all(profile.description.endswith(".") and len(profile.description) < 250 for profile in profiles.values())
    config = RewardConfig.model_validate({"remote": {"url": "http://127.0.0.1:1"}})
    assert set(make_profiles(config, {"mine": "mine.py:verify"})) == _BUILT_IN | {"remote", "mine"}


_WORDS = st.sampled_from(["<think>", "</think>", "\\boxed{", "}", "a", "\n", ""])
_PIECES = st.sampled_from([".*", ".*?", "<think>", "</think>", r"\\boxed\{", r"\}", "a", r"\n", "x", "[ab]", "a+"])


@given(pattern=st.lists(_PIECES, max_size=6).map("".join), response=st.lists(_WORDS, max_size=12).map("".join))
def test_a_format_is_matched_as_re_does(pattern: str, response: str) -> None:
    """Here or in a worker, `re.fullmatch` with DOTALL is what counts."""
    has_format = Format(pattern, max_chars=1000).check(response)
    if isinstance(has_format, FormatTask):
        assert "[ab]" in pattern or "a+" in pattern or r"\n" in pattern
        assert (has_format.pattern, has_format.text) == (pattern, response)
    else:
        assert has_format == (re.fullmatch(pattern, response, re.DOTALL) is not None)


@pytest.mark.timeout(20)
def test_a_response_cannot_make_verls_own_pattern_hang() -> None:
    """`re` would take time that grows with the fourth power of this response."""
    response = "<think>" + "</think>\\boxed{" * 300_000
    assert score("verl_geo3k", response) == 0.0


def test_a_worker_sees_both_ends_of_a_long_response() -> None:
    """Half of the limit from the start, where <think> is, and half from the end."""
    task = Format("[<]a.*z", max_chars=10).check("<aaaaaa" + "-" * 100 + "zzzzzz")
    assert task == FormatTask(pattern="[<]a.*z", text="<aaaazzzzz")
