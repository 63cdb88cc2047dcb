"""Estimators of an evaluation, against enumeration of every choice of samples."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Hashable, Sequence

import pytest

from services.trainer.evaluation.estimators import ABSTAINED, estimate, majority_at, pass_at


def enumerated_majority(votes: Sequence[Hashable], k: int, correct: Hashable) -> float:
    """The same by taking every subset, and counting."""
    shares = []
    for chosen in itertools.combinations(votes, k):
        counts = Counter(vote for vote in chosen if vote is not ABSTAINED)
        most = max(counts.values(), default=0)
        winners = [vote for vote, count in counts.items() if count == most]
        shares.append(winners.count(correct) / len(winners) if winners else 0.0)
    return sum(shares) / len(shares)


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample() -> None:
    """For every number of samples up to 7."""
    for num_samples in range(1, 8):
        for num_correct, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
            marks = [True] * num_correct + [False] * (num_samples - num_correct)
            subsets = list(itertools.combinations(marks, k))
            expected = sum(map(any, subsets)) / len(subsets)
            assert pass_at(k, num_samples=num_samples, num_correct=num_correct) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_of_many_samples_keeps_its_precision() -> None:
    """With 4096 samples the binomials have more than a thousand digits."""
    product = 1.0
    for number in range(4096 - 3 + 1, 4096 + 1):
        product *= 1 - 2048 / number
    assert pass_at(2048, num_samples=4096, num_correct=3) == pytest.approx(1 - product, rel=1e-12)


def test_majority_is_the_share_of_subsets_that_it_wins() -> None:
    """With ties, abstentions, and no correct vote at all among the cases."""
    draw = random.Random(0)
    for _ in range(300):
        votes = [draw.choice(["right", "a", "b", "c", ABSTAINED]) for _ in range(draw.randint(1, 8))]
        for k in range(1, len(votes) + 1):
            expected = enumerated_majority(votes, k, "right")
            assert majority_at(k, votes, correct="right") == pytest.approx(expected, abs=1e-12), (votes, k)


def test_majority_at_one_is_pass_at_one() -> None:
    """One voter decides alone."""
    votes = ["right", "right", "a", ABSTAINED, "b"]
    assert majority_at(1, votes, correct="right") == pytest.approx(pass_at(1, num_samples=5, num_correct=2))


def test_majority_of_64_samples_is_computed_exactly() -> None:
    """All 64 votes have one outcome: the correct one has the most."""
    votes = ["right"] * 22 + ["a"] * 21 + ["b"] * 21
    assert majority_at(64, votes, correct="right") == 1.0
    assert majority_at(64, ["right"] * 21 + ["a"] * 22 + ["b"] * 21, correct="right") == 0.0
    assert majority_at(64, ["right"] * 32 + ["a"] * 32, correct="right") == 0.5


def test_majority_of_many_samples() -> None:
    """With 2048 samples the ways to choose are more than a float holds."""
    assert majority_at(2048, ["right"] * 1024 + [ABSTAINED] * 1024, correct="right") == 1.0
    assert majority_at(1024, ["right"] * 2047 + ["a"], correct="right") == pytest.approx(1.0, abs=1e-10)
    assert majority_at(1024, ["right"] + ["a"] * 2047, correct="right") == 0.0
    assert majority_at(1024, ["right"] + [ABSTAINED] * 2047, correct="right") == pytest.approx(0.5, abs=1e-10)


def test_the_order_of_votes_changes_no_bit() -> None:
    """Samples come in any order."""
    draw = random.Random(2)
    for _ in range(100):
        votes = [draw.choice(["right", *"abcdefg", ABSTAINED]) for _ in range(24)]
        found = {majority_at(9, draw.sample(votes, 24), correct="right") for _ in range(3)}
        assert len(found) == 1


def test_an_answer_without_others_wins_with_one_vote() -> None:
    """A policy that is always right has maj@k = 1."""
    assert {majority_at(k, ["right"] * 8, correct="right") for k in range(1, 9)} == {1.0}
    assert majority_at(2, ["right", *[ABSTAINED] * 3], correct="right") == 0.5
    assert majority_at(2, [ABSTAINED] * 4, correct="right") == 0.0


@pytest.mark.parametrize("k", [64, 512])
def test_one_of_many_answers_wins(k: int) -> None:
    """Over all answers the probabilities sum to 1, of a thousand samples too."""
    spread = {"a": 412, "b": 257, "c": 103, "d": 51, **{f"rare {number}": 3 for number in range(69)}}
    votes = [answer for answer, number in spread.items() for _ in range(number)]
    won = [majority_at(k, votes, correct=answer) for answer in ["a", "b", "c", "d"]]
    rarely = majority_at(k, votes, correct="rare 0")
    assert sum(won) + 69 * rarely == pytest.approx(1.0, abs=1e-10)
    assert won[0] > 0.9


def test_the_error_of_independent_values_is_the_usual_one() -> None:
    """One value per prompt: standard deviation over the root of their number."""
    values = [1.0, 0.0, 0.0, 1.0, 1.0, 0.5]
    mean = sum(values) / 6
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / 5)
    found = estimate([[value] for value in values])
    assert found.value == pytest.approx(mean)
    assert found.standard_error == pytest.approx(deviation / math.sqrt(6))


def test_repeating_a_prompts_samples_does_not_make_the_error_smaller() -> None:
    """Ten equal samples of a prompt say as much as one; counted as independent they would seem to say more."""
    once = estimate([[1.0], [0.0], [1.0], [1.0]])
    tenfold = estimate([[1.0] * 10, [0.0] * 10, [1.0] * 10, [1.0] * 10])
    assert tenfold.value == once.value
    assert once.standard_error is not None
    assert tenfold.standard_error == pytest.approx(once.standard_error)


def test_the_error_is_that_of_drawing_prompts_again() -> None:
    """Against the bootstrap over prompts, which draws each with all its samples, however many they are."""
    draw = random.Random(1)
    prompts = []
    for _ in range(80):
        skill = draw.random()
        prompts.append([float(draw.random() < skill) for _ in range(draw.choice([2, 4, 8]))])
    found = estimate(prompts)
    means = []
    for _ in range(2000):
        again = draw.choices(prompts, k=len(prompts))
        means.append(sum(map(sum, again)) / sum(map(len, again)))
    middle = sum(means) / len(means)
    spread = math.sqrt(sum((mean - middle) ** 2 for mean in means) / (len(means) - 1))
    assert found.standard_error == pytest.approx(spread, rel=0.1)


def test_one_prompt_says_nothing_about_the_error() -> None:
    """However many samples it has."""
    assert estimate([[1.0, 0.0, 1.0]]).standard_error is None


@pytest.mark.parametrize("k", [0, 5])
def test_a_k_that_cannot_be_drawn_is_refused(k: int) -> None:
    """Four samples have no pass@5."""
    with pytest.raises(ValueError, match=rf"k = {k} must be in 1 \.\. 4"):
        pass_at(k, num_samples=4, num_correct=1)
    with pytest.raises(ValueError, match=rf"k = {k} must be in 1 \.\. 4"):
        majority_at(k, "abcd", correct="a")


def test_nothing_cannot_be_estimated() -> None:
    """Neither of no prompt nor of a prompt without values."""
    with pytest.raises(ValueError, match="at least one prompt"):
        estimate([])
    with pytest.raises(ValueError, match="a value of each"):
        estimate([[1.0], []])
