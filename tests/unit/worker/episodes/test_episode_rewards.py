"""What a sample is worth: its steps' rewards, or else the verdict on its last turn; and what is never a wrong 0."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from penstock.environments import StepResult, Task
from penstock.errors import DeadlineError, InvalidRequestError, PenstockError, SetupError, UnavailableError
from penstock.model.chat.chat_template import Renderer
from penstock.records import Group, Limits, Verdict
from penstock.records.codec import decode, encode
from penstock.v1 import reward_pb2
from services.rollout.worker.answer_verifier import AnswerVerifier
from services.rollout.worker.closings import Closings
from services.rollout.worker.episodes.episode import Episode
from services.rollout.worker.group_rollout import GroupRollout
from tests.support.image_shelf import ImageShelf
from tests.support.waiting import settled
from tests.support.worker.scripted_episodes import (
    DONE,
    END,
    PICTURE,
    Scripted,
    ScriptedPolicy,
    make_player,
    make_prompt,
    play,
    shows,
)
from tests.support.worker.verifiers import Boxes

LIMIT_S = 600.0


async def check(task: Task) -> StepResult:
    """An answer whose reward is the verdict on what the environment asks about."""
    verdict = await task.grade("\\boxed{3}")
    return StepResult(observation=None, reward=verdict.score)


async def check_carelessly(task: Task) -> StepResult:
    """The same of an environment that takes every failure for a wrong answer."""
    try:
        return await check(task)
    except Exception:  # noqa: BLE001 - as other people's code does
        return StepResult(observation=None, reward=0.0)


async def check_and_go_on(task: Task) -> StepResult:
    """An answer that tells of a failure and gives no reward for it."""
    try:
        verdict = await task.grade("\\boxed{3}")
    except PenstockError:
        return shows("The check is out of order.")
    return shows("Right." if verdict.is_judged else "That could not be checked.")


async def play_one(renderer: Renderer, verifier: Boxes, *answers: Any, **changes: Any) -> Episode:
    """Play a script of one turn or two."""
    Scripted.plays(*answers)
    policy = ScriptedPolicy(renderer, [("\\boxed{3}" + END, 4), ("\\boxed{4}" + END, 4)])
    player = make_player(renderer, policy, verifier=verifier)
    return await play(player, make_prompt("Scripted", **changes))


async def play_group(
    renderer: Renderer, *answers: Any, texts: Sequence[str] = ("one", "two"), verifier: Boxes
) -> Group:
    """Play a script as a group of one sample."""
    Scripted.plays(*answers)
    shelf, prompt = ImageShelf(), make_prompt("Scripted", num_samples=1)
    await shelf.put(prompt.id.scope, PICTURE)
    policy = ScriptedPolicy(renderer, [(text + END, 4) for text in texts])
    rollout = GroupRollout(
        episodes=make_player(renderer, policy),
        images=shelf,
        answer_verifier=AnswerVerifier(verifier),
        worker_id="worker-a",
    )
    async with Closings() as closings:
        return await rollout.play(prompt, closings)


@pytest.mark.parametrize(
    ("first", "last", "score"), [("\\boxed{3}", "\\boxed{4}", 0.0), ("\\boxed{4}", "\\boxed{3}", 1.0)]
)
async def test_only_the_last_turn_is_judged(renderer: Renderer, first: str, last: str, score: float) -> None:
    """A box of the first turn wins nothing, nor does what the environment says."""
    verifier = Boxes()
    answers = shows("The answer is \\boxed{3}."), DONE
    [sample] = (await play_group(renderer, *answers, texts=(first, last), verifier=verifier)).samples
    assert verifier.judged == [last]
    assert (sample.reward, sample.text) == (score, f"{first}\n{last}")


async def test_rewards_of_steps_are_added_up(renderer: Renderer) -> None:
    """No verdict is asked for, not even if only one step has a reward."""
    some = shows("Go on.", reward=0.5), StepResult(observation=None, reward=-0.75)
    episode = await play_one(renderer, Boxes(), *some)
    assert (episode.reward, episode.needs_verdict) == (-0.25, False)
    episode = await play_one(renderer, Boxes(), shows("Go on.", reward=0.5), DONE)
    assert (episode.reward, episode.needs_verdict) == (0.5, False)


@pytest.mark.parametrize("reward", [2**64, True, np.float32(0.5), Fraction(1, 2)], ids=str)
async def test_numbers_of_any_library_can_be_sent(renderer: Renderer, reward: Any) -> None:
    """As a reward and as a metric."""
    result = StepResult(observation=None, reward=reward, metrics={"share": reward})
    group = decode(encode(await play_group(renderer, result, verifier=Boxes())), Group)
    [sample] = group.samples
    assert (sample.reward, sample.metrics) == (float(reward), {"share": float(reward)})


async def test_rewards_that_add_up_to_no_number_end_their_sample(renderer: Renderer) -> None:
    """Its group is not played again for them."""
    answers = shows("Go on.", reward=1e308), StepResult(observation=None, reward=1e308)
    [sample] = (await play_group(renderer, *answers, verifier=Boxes())).samples
    assert (sample.reward, sample.finish_reason) == (None, "error")
    assert "the rewards of its steps add up to inf" in sample.error


async def test_a_samples_metrics_are_the_last_of_each_name(renderer: Renderer) -> None:
    """A count goes up from step to step; what only the first step measures stays."""
    answers = (
        shows("Go on.", metrics={"first": 1.0, "num_calls": 1.0}),
        StepResult(observation=None, reward=1.0, metrics={"num_calls": 2.0}),
    )
    sample = (await play_one(renderer, Boxes(), *answers)).to_sample(None)
    assert sample.metrics == {"first": 1.0, "num_calls": 2.0}
    assert [turn.metrics for turn in sample.turns] == [{"first": 1.0, "num_calls": 1.0}, {"num_calls": 2.0}]


async def test_an_environment_may_ask_for_verdicts(renderer: Renderer) -> None:
    """By the row's golds and profile, as at the end of a single turn."""
    verifier = Boxes()
    episode = await play_one(renderer, verifier, check)
    assert (episode.reward, episode.finish_reason, verifier.judged) == (1.0, "stop", ["\\boxed{3}"])


async def test_half_a_character_can_be_graded(renderer: Renderer) -> None:
    """As JSON's escapes can spell it in the arguments of a call; it is judged as U+FFFD."""

    async def check_call(task: Task) -> StepResult:
        verdict = await task.grade("\ud800\\boxed{3}")
        return StepResult(observation=None, reward=verdict.score)

    verifier = Boxes()
    episode = await play_one(renderer, verifier, check_call)
    assert (episode.reward, episode.error, verifier.judged) == (1.0, "", ["\ufffd\\boxed{3}"])


@pytest.mark.parametrize("answer", [check, check_carelessly])
@pytest.mark.parametrize("where", ["reset", "step"])
async def test_a_wrong_gold_reaches_the_group(renderer: Renderer, answer: Any, where: str) -> None:
    """It is a fault of the data, not of the sample, whatever the environment makes of it."""
    verifier = Boxes(status=reward_pb2.VERDICT_STATUS_GOLD_INVALID)
    Scripted.plays(answer, resets=[answer] if where == "reset" else [])
    policy = ScriptedPolicy(renderer, [("one" + END, 4)])
    with pytest.raises(InvalidRequestError, match=r"gold answers .* cannot be read by reward profile 'math'; correct"):
        await play(make_player(renderer, policy, verifier=verifier), make_prompt("Scripted"))
    assert (Scripted.num_made, Scripted.num_closed) == (1, 1)


async def test_a_wrong_gold_reaches_the_group_of_an_environment_that_hangs(renderer: Renderer, clock: Any) -> None:
    """Its deadline does not hide what is wrong."""

    async def hang(task: Task) -> StepResult:
        clock.at += 2 * LIMIT_S
        await asyncio.gather(task.grade("?"), return_exceptions=True)  # sets the timer anew
        await asyncio.Event().wait()
        raise AssertionError

    verifier = Boxes(status=reward_pb2.VERDICT_STATUS_GOLD_INVALID)
    with pytest.raises(InvalidRequestError, match="gold answers"):
        await play_one(renderer, verifier, hang, limits=Limits(episode_timeout_s=LIMIT_S))


@pytest.mark.parametrize("answer", [check, check_carelessly])
async def test_a_reward_service_that_must_be_set_up_stops_the_worker(renderer: Renderer, answer: Any) -> None:
    """As at the end of a single turn."""
    with pytest.raises(SetupError, match="no such host"):
        await play_one(renderer, Boxes(failure=SetupError("no such host")), answer)


@pytest.mark.parametrize("answer", [check, check_carelessly])
@pytest.mark.parametrize(
    ("verifier", "reason"),
    [
        (Boxes(failure=UnavailableError("the reward service is away")), "the reward service is away"),
        (Boxes(failure=DeadlineError("the reward service hangs")), "the reward service hangs"),
        (Boxes(status=reward_pb2.VERDICT_STATUS_TIMEOUT), "TIMEOUT"),
    ],
    ids=["away", "hangs", "too slow"],
)
async def test_what_nobody_judged_is_no_wrong_answer(
    renderer: Renderer, answer: Any, verifier: Boxes, reason: str
) -> None:
    """The sample is unjudged, with the reason, and the 0 of an earlier step is not its reward."""
    episode = await play_one(renderer, verifier, shows("Go on.", reward=0.0), answer)
    sample = episode.to_sample(None)
    assert (sample.reward, sample.finish_reason, episode.needs_verdict) == (None, "error", False)
    assert reason in sample.error


@pytest.mark.parametrize(
    "wait",
    [asyncio.wait_for, lambda asking, timeout_s: asyncio.wait({asking}, timeout=timeout_s)],
    ids=["takes the question back", "leaves the question open"],
)
async def test_a_verdict_that_nobody_waited_for_is_no_wrong_answer(
    renderer: Renderer, wait: Callable[[asyncio.Task[Verdict], float], Awaitable[object]]
) -> None:
    """An environment that bounds its wait by itself does not make a wrong answer of a service that is away."""
    answers, questions = asyncio.Event(), list[asyncio.Task[Verdict]]()

    async def check_impatiently(task: Task) -> StepResult:
        questions.append(asyncio.create_task(task.grade("\\boxed{3}")))
        with contextlib.suppress(TimeoutError):
            await wait(questions[0], 0.01)
        return StepResult(observation=None, reward=0.0)

    episode = await play_one(renderer, Boxes(before=answers.wait), check_impatiently)
    assert (episode.reward, episode.finish_reason, episode.needs_verdict) == (None, "error", False)
    assert "the wait for the verdict was cut short" in episode.error
    answers.set()
    await asyncio.wait(questions)


@pytest.mark.parametrize(
    "verifier",
    [Boxes(failure=UnavailableError("away")), Boxes(status=reward_pb2.VERDICT_STATUS_TIMEOUT)],
    ids=["away", "too slow"],
)
async def test_an_environment_may_go_on_without_a_verdict(renderer: Renderer, verifier: Boxes) -> None:
    """Its step has no reward, and a later one has nothing to do with it."""
    last = StepResult(observation=None, reward=1.0)
    episode = await play_one(renderer, verifier, check_and_go_on, last)
    assert (episode.reward, episode.finish_reason, episode.error) == (1.0, "stop", "")


async def test_waiting_for_verdicts_is_not_counted(renderer: Renderer, clock: Any) -> None:
    """The episode's clock stands still while the reward service is away; afterwards it goes on."""

    async def wait() -> None:
        clock.at += 2 * LIMIT_S
        await settled()

    async def check_twice(task: Task) -> StepResult:
        await asyncio.gather(task.grade("one"), task.grade("two"))
        return shows("Go on.")

    async def hang(task: Task) -> StepResult:
        clock.at += 2 * LIMIT_S
        await task.grade("three")  # sets the timer anew
        await asyncio.Event().wait()
        raise AssertionError

    limits = Limits(episode_timeout_s=LIMIT_S)
    episode = await play_one(renderer, Boxes(before=wait), check_twice, DONE, limits=limits)
    assert episode.finish_reason == "stop"
    episode = await play_one(renderer, Boxes(before=wait), check_twice, hang, limits=limits)
    assert (episode.finish_reason, len(episode.trajectory.turns)) == ("deadline", 2)
