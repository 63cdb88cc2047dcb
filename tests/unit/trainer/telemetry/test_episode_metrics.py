"""What a step says of its episodes."""

from pathlib import Path

import msgspec

from penstock.records import Group, Turn
from services.trainer.telemetry.episode_metrics import describe_episodes
from tests.support.trainer.groups import make_group


def make_turn(num_prompt_tokens: int, num_output_tokens: int) -> Turn:
    """A turn with these numbers of tokens."""
    return Turn(
        replica_id="a",
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=0,
        num_output_tokens=num_output_tokens,
    )


def test_turns_observations_and_endings_are_counted(tiny_model_path: Path) -> None:
    """Of samples, whatever their groups."""
    first, second = make_group(tiny_model_path, rewards=[0.0, 1.0]).samples
    two_turns = (make_turn(100, 5), make_turn(125, 7), make_turn(142, 1))  # 20 tokens after the first turn, then 10
    samples = (
        msgspec.structs.replace(first, turns=two_turns, finish_reason="environment"),
        msgspec.structs.replace(second, turns=(make_turn(100, 9),), finish_reason="error"),
    )
    group = msgspec.structs.replace(make_group(tiny_model_path, rewards=[0.0, 1.0]), samples=samples)
    told = describe_episodes([group])
    assert (told["turns_mean"], told["turns_max"], told["observation_tokens_mean"]) == (2.0, 3, 15.0)
    assert (told["num_environment_samples"], told["num_error_samples"]) == (1, 1)


def test_first_turn_accuracy_is_what_was_right_without_another_turn(tiny_model_path: Path) -> None:
    """Of four samples one: the second took another turn, the third was wrong, the fourth unjudged."""
    once, twice = (make_turn(100, 5),), (make_turn(100, 5), make_turn(125, 7))
    made = make_group(tiny_model_path, rewards=[1.0, 1.0, 0.0, 0.0])
    samples = tuple(
        msgspec.structs.replace(sample, turns=turns, reward=reward, verdict=None)
        for sample, turns, reward in zip(made.samples, (once, twice, once, once), (1.0, 1.0, 0.0, None), strict=True)
    )
    assert describe_episodes([msgspec.structs.replace(made, samples=samples)])["first_turn_accuracy"] == 0.25


def test_environments_are_told_apart(tiny_model_path: Path) -> None:
    """A metric is averaged over the samples that have it, by the name of the environment that played them."""

    def group(environment: str, *metrics: dict[str, float]) -> Group:
        made = make_group(tiny_model_path, rewards=[0.0] * len(metrics))
        samples = tuple(
            msgspec.structs.replace(sample, metrics=each) for sample, each in zip(made.samples, metrics, strict=True)
        )
        return msgspec.structs.replace(made, environment=environment, samples=samples)

    told = describe_episodes(
        [
            group("zoom", {"num_calls": 2.0, "right": 1.0}, {"num_calls": 3.0}),
            group("zoom", {"num_calls": 7.0}, {}),
            group("python", {"num_calls": 1.0}, {"num_calls": 0.0}),
        ]
    )
    assert {name: value for name, value in told.items() if name.startswith("environment/")} == {
        "environment/zoom/num_calls": 4.0,
        "environment/zoom/right": 1.0,
        "environment/python/num_calls": 0.5,
    }


def test_an_empty_batch_has_no_mean() -> None:
    """It is told all the same."""
    assert describe_episodes([])["turns_mean"] == 0.0
