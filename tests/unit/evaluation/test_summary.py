"""The numbers of a set, by hand."""

import msgspec
import pytest

from services.trainer.evaluation.outcome import PlayedPrompt, PlayedSample, source_of
from services.trainer.evaluation.report import describe
from services.trainer.evaluation.summary import summarize


def sample(score: float | None, *, extracted: str = "", tokens: int = 10, finish: str = "stop") -> PlayedSample:
    """One answer."""
    return PlayedSample(
        text="...",
        score=score,
        extracted=extracted,
        status="OK" if extracted else "NO_ANSWER",
        finish_reason=finish,
        num_tokens=tokens,
    )


def prompt(row: int, *samples: PlayedSample, source: str = "", error: str = "") -> PlayedPrompt:
    """One prompt with its answers."""
    return PlayedPrompt(
        set_name="s", row=row, source=source, messages=[], golds=("1",), samples=samples, versions=None, error=error
    )


def test_the_numbers_of_two_prompts() -> None:
    """avg@4, pass@k, maj@k, shares and lengths, each computed by hand."""
    prompts = [
        prompt(
            0,
            sample(1.0, extracted="1", tokens=5),
            sample(1.0, extracted="1.0", tokens=6),  # written otherwise, the same answer
            sample(0.0, extracted="2", tokens=7),
            sample(0.0, tokens=40, finish="length"),
        ),
        prompt(
            1,
            sample(0.0, extracted="3", tokens=8),
            sample(0.0, extracted="3", tokens=9),
            sample(1.0, extracted="1", tokens=10),
            sample(None, extracted="?", tokens=11, finish="deadline"),
        ),
    ]
    found = summarize(prompts, samples_per_prompt=4, pass_score=1.0)
    assert found.score is not None
    assert found.score.value == pytest.approx(3 / 8)
    assert found.score.standard_error == pytest.approx(1 / 8)  # means 1/2 and 1/4
    assert list(found.pass_at) == [1, 2, 4]
    assert found.pass_at[1].value == pytest.approx(3 / 8)
    assert found.pass_at[2].value == pytest.approx(((1 - 1 / 6) + (1 - 3 / 6)) / 2)
    assert found.pass_at[4].value == 1.0
    assert list(found.majority_at) == [2, 4]
    assert found.majority_at[4].value == pytest.approx(1 / 2)  # two right of three votes; two wrong ones agree
    assert (found.truncated_fraction, found.no_answer_fraction, found.unjudged_fraction) == (2 / 8, 1 / 8, 1 / 8)
    assert found.tokens is not None
    assert (found.tokens.mean, found.tokens.median, found.tokens.p95, found.tokens.max) == (12.0, 8, 40, 40)
    assert found.sources == {}


def test_prompts_that_failed_are_counted_apart() -> None:
    """They have no samples, so no number but their own has them."""
    found = summarize(
        [prompt(0, sample(1.0, extracted="1")), prompt(1, error="too long")], samples_per_prompt=1, pass_score=1
    )
    assert (found.num_prompts, found.num_failed_prompts) == (1, 1)
    assert found.score is not None
    assert found.score.value == 1.0


def test_a_set_of_which_nothing_was_played_has_no_score() -> None:
    """And no lengths, instead of zeros that read as results."""
    found = summarize([prompt(0, error="no")], samples_per_prompt=2, pass_score=1)
    assert (found.score, found.tokens, found.pass_at, found.majority_at) == (None, None, {}, {})
    assert found.num_failed_prompts == 1


def test_sources_have_numbers_of_their_own() -> None:
    """In the order of their names, each over its own prompts."""
    found = summarize(
        [
            prompt(0, sample(1.0, extracted="1"), source="b"),
            prompt(1, sample(0.0, extracted="2"), source="a"),
            prompt(2, sample(1.0, extracted="1"), source="a"),
        ],
        samples_per_prompt=1,
        pass_score=1.0,
    )
    assert {name: (part.num_prompts, part.score and part.score.value) for name, part in found.sources.items()} == {
        "a": (2, 0.5),
        "b": (1, 1.0),
    }
    assert list(found.sources) == ["a", "b"]
    assert found.as_json()["sources"]["a"]["pass_at"][1]["value"] == 0.5


def test_the_pass_score_decides_what_is_correct() -> None:
    """Profiles with a format bonus give less than 1 to a correct answer in a wrong form."""
    prompts = [prompt(0, sample(0.9, extracted="1"))]
    assert summarize(prompts, samples_per_prompt=1, pass_score=1.0).pass_at[1].value == 0.0
    assert summarize(prompts, samples_per_prompt=1, pass_score=0.9).pass_at[1].value == 1.0


@pytest.mark.parametrize(
    ("column", "source"), [("", ""), ("level", "3"), ("info.split", "test"), ("info.none", "none"), ("level.x", "none")]
)
def test_a_column_names_the_source(column: str, source: str) -> None:
    """Also inside a struct; a row without the value belongs to `none`."""
    assert source_of({"level": 3, "info": {"split": "test"}}, column) == source


def test_what_environments_measured_is_averaged() -> None:
    """Over the samples that have it; a set of single turns without metrics has no line for it."""
    measured = [
        msgspec.structs.replace(sample(1.0), num_turns=3, metrics={"first_attempt": 1.0, "num_calls": 2.0}),
        msgspec.structs.replace(sample(0.0), num_turns=2, metrics={"num_calls": 1.0}),
    ]
    found = summarize([prompt(0, *measured)], samples_per_prompt=2, pass_score=1.0)
    assert (found.turns_mean, found.metrics) == (2.5, {"first_attempt": 1.0, "num_calls": 1.5})
    plain = summarize([prompt(0, sample(1.0))], samples_per_prompt=1, pass_score=1.0)
    told = [line for line in describe({"test": found, "plain": plain}) if "turns" in line]
    assert told == ["test: 2.50 turns a sample, first_attempt 1, num_calls 1.5"]
