"""How an episode ends: deadlines, failures, cancellation, a full context."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.bus.image_store import hash_of
from penstock.errors import (
    DeadlineError,
    InvalidRequestError,
    MissingImageError,
    PenstockError,
    PoisonError,
    PromptTooLongError,
    UnavailableError,
)
from penstock.model.chat.chat_template import Renderer
from penstock.records import Limits, Verdict
from penstock.v1 import generate_pb2
from services.rollout.worker.answer_verifier import AnswerVerifier
from services.rollout.worker.closings import Closings
from services.rollout.worker.episodes.trajectory import DEADLINE, LENGTH, STOP
from services.rollout.worker.group_images import GroupImages
from services.rollout.worker.group_rollout import GroupRollout
from services.rollout.worker.shared_rendering import SharedRendering
from tests.support.image_shelf import ImageShelf
from tests.support.trainer.read_groups import reader_of
from tests.support.waiting import promptly
from tests.support.worker.scripted_episodes import (
    END,
    PICTURE,
    SECOND_PICTURE,
    NoVerifier,
    Scripted,
    ScriptedPolicy,
    Stuck,
    TwoTurns,
    make_player,
    make_prompt,
    play,
    shows,
)

WRONG = Verdict(score=0.0, status="OK", extracted="", method="EXACT")


async def test_a_turn_that_was_cut_ends_the_episode(renderer: Renderer) -> None:
    """The environment is not asked about half a sentence."""
    policy = ScriptedPolicy(renderer, [("\\boxed{", 4)], finish=LENGTH)
    episode = await play(make_player(renderer, policy), make_prompt("TwoTurns"), 0)
    assert (episode.finish_reason, episode.text) == ("length", "\\boxed{")
    assert TwoTurns.last.heard == []


@pytest.mark.parametrize(
    ("environment", "turns", "limits", "finish", "is_cut_short"),
    [
        ("TwoTurns", [("half", 4)], Limits(), LENGTH, True),
        ("TwoTurns", [("half", 4)], Limits(), DEADLINE, True),
        ("TwoTurns", [("one" + END, 4)], Limits(max_turns=1), STOP, False),
        ("TwoTurns", [("one" + END, 4)], Limits(max_images=1), STOP, False),
        ("TwoTurns", [("one" + END, 4), DeadlineError("no token came")], Limits(), STOP, False),
        ("Stuck", [("one" + END, 4)], Limits(episode_timeout_s=1.5), STOP, True),
        ("single_turn", [("half", 4)], Limits(), LENGTH, False),
    ],
    ids=["cut", "out of time", "turns used up", "observation too large", "no next turn", "stuck", "single turn"],
)
async def test_a_sample_says_whether_it_ended_before_its_environment_had_answered(
    renderer: Renderer, environment: str, turns: list[Any], limits: Limits, finish: Any, *, is_cut_short: bool
) -> None:
    """The trainer tells a verdict on such a text from one on an answer that the environment took."""
    policy = ScriptedPolicy(renderer, turns, finish=finish)
    episode = await play(make_player(renderer, policy), make_prompt(environment, limits=limits))
    assert episode.finish_reason != "stop"
    assert episode.to_sample(WRONG).is_cut_short == is_cut_short


async def test_the_last_turn_allowed_ends_the_episode(renderer: Renderer) -> None:
    """An observation that no turn will answer is not part of the sample."""
    policy = ScriptedPolicy(renderer, [("one" + END, 4)])
    episode = await play(make_player(renderer, policy), make_prompt("TwoTurns", limits=Limits(max_turns=1)))
    assert episode.finish_reason == "environment"
    assert episode.trajectory.token_ids == [*policy.requests[0].input_ids, *policy.ids("one" + END)]
    assert episode.trajectory.images == [hash_of(PICTURE)]


async def test_an_environment_may_cut_the_episode_short(renderer: Renderer) -> None:
    """That is told apart from an end that the policy reached."""
    policy = ScriptedPolicy(renderer, [("one" + END, 4)])
    episode = await play(make_player(renderer, policy), make_prompt("Truncating"), 0)
    assert episode.finish_reason == "environment"


async def test_a_full_context_ends_the_episode_before_the_observation(renderer: Renderer) -> None:
    """What does not fit is not sent to fail in the engine; the turns played so far count."""

    async def play_within(context_length: int | None) -> tuple[str, list[generate_pb2.GenerateRequest]]:
        policy = ScriptedPolicy(renderer, [("one" + END, 4), ("two" + END, 4)])
        player = make_player(renderer, policy, context_length=context_length)
        episode = await play(player, make_prompt("TwoTurns"), 0)
        return episode.finish_reason, policy.requests

    _, unlimited = await play_within(None)
    # The scripted engine expands the prompt's picture by 8 tokens; 16 tokens of room are kept for the answer.
    just_enough = len(unlimited[1].input_ids) + 8 + 16
    finish_reason, requests = await play_within(just_enough)
    assert (finish_reason, len(requests)) == ("stop", 2)
    finish_reason, requests = await play_within(just_enough - 1)
    assert (finish_reason, len(requests)) == ("length", 1)


async def test_a_turn_that_takes_too_long_ends_its_sample_with_the_tokens_that_came(renderer: Renderer) -> None:
    """A slow sample is never drawn again; its reason is not taken for a full context."""
    policy = ScriptedPolicy(renderer, [("\\boxed{", 4)], hang=True)
    episode = await play(make_player(renderer, policy), make_prompt("TwoTurns", limits=Limits(turn_timeout_s=0.1)), 0)
    assert (episode.finish_reason, episode.text, episode.error) == ("deadline", "\\boxed{", "")
    assert TwoTurns.last.heard == []


async def test_an_environment_that_hangs_ends_the_sample_at_the_episodes_deadline(renderer: Renderer) -> None:
    """Every await on the outside world has one; the policy's turn counts."""
    policy = ScriptedPolicy(renderer, [("one" + END, 4)])
    episode = await play(make_player(renderer, policy, episode_timeout_s=1.5), make_prompt("Stuck"), 0)
    assert (episode.finish_reason, episode.text, episode.error) == ("deadline", "one", "")
    assert TwoTurns.last.num_closed == 1


async def test_an_environment_that_fails_ends_its_own_sample_unjudged(renderer: Renderer) -> None:
    """What it raises may depend on what the policy said, so nothing is drawn again for it."""
    policy = ScriptedPolicy(renderer, [("one" + END, 4)])
    episode = await play(make_player(renderer, policy), make_prompt("Broken"), 0)
    assert (episode.finish_reason, episode.text) == ("error", "one")
    assert episode.error == "environment 'Broken': RuntimeError: the tool crashed"
    assert TwoTurns.last.num_closed == 1


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (PromptTooLongError("13 tokens of room"), "length"),
        (PoisonError("given up after 3 replicas failed"), "error"),
        (InvalidRequestError("images[1] cannot be decoded"), "error"),
        (PenstockError("router: RuntimeError: out of memory"), "error"),
        (DeadlineError("no token came"), "deadline"),
    ],
)
async def test_a_later_turn_that_fails_ends_the_sample_with_the_turns_before(
    renderer: Renderer, error: PenstockError, ending: str
) -> None:
    """Tokens are never thrown away, so long episodes are not selected against."""
    policy = ScriptedPolicy(renderer, [("one" + END, 4), error])
    episode = await play(make_player(renderer, policy), make_prompt("TwoTurns"), 0)
    assert (episode.finish_reason, episode.text) == (ending, "one")
    reason = {"error": str(error) if ending == "error" else "", "ended_by": str(error) if ending != "error" else ""}
    assert {"error": episode.error, "ended_by": episode.ended_by} == reason


async def test_a_picture_that_no_engine_can_read_costs_no_other_sample(
    renderer: Renderer, tiny_model_path: Path
) -> None:
    """The sample has no part of the observation that shows it, so the trainer can read its group."""
    damaged = SECOND_PICTURE[:-10]
    Scripted.plays(shows("Look.", damaged))
    shelf, prompt = ImageShelf(), make_prompt("Scripted", num_samples=1)
    await shelf.put(prompt.id.scope, PICTURE)
    policy = ScriptedPolicy(renderer, [("one" + END, 4), InvalidRequestError("images[1] cannot be decoded")])
    verifier, player = AnswerVerifier(NoVerifier()), make_player(renderer, policy)
    rollout = GroupRollout(episodes=player, images=shelf, answer_verifier=verifier, worker_id="worker-a")
    async with Closings() as closings:
        group = await rollout.play(prompt, closings)
    [sequence] = group.samples[0].sequences
    assert policy.requests[1].images[1].stored.sha256 == hash_of(damaged)
    assert sequence.token_ids.tolist() == [*policy.requests[0].input_ids, *policy.ids("one" + END)]
    assert sequence.images == (hash_of(PICTURE),)
    files = {hash_of(PICTURE): PICTURE, hash_of(damaged): damaged}
    [[read]] = reader_of(tiny_model_path).read(group, files).samples
    assert read.num_own_tokens == sequence.num_own_tokens


async def test_a_cancelled_episode_closes_its_environment(renderer: Renderer) -> None:
    """Cancelling waits for nothing else."""
    policy = ScriptedPolicy(renderer, [("one" + END, 4)])
    Stuck.asked = asyncio.Event()
    task = asyncio.create_task(play(make_player(renderer, policy), make_prompt("Stuck")))
    await promptly(Stuck.asked.wait())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert TwoTurns.last.num_closed == 1


async def test_the_generators_failure_is_the_episodes(renderer: Renderer) -> None:
    """A sample without a token fails its group."""

    policy = ScriptedPolicy(renderer, [UnavailableError("no replica")])
    with pytest.raises(UnavailableError, match="no replica"):
        await play(make_player(renderer, policy, wait_timeout_s=0.01), make_prompt("TwoTurns"), 0)
    assert TwoTurns.last.num_closed == 1


async def test_an_image_that_is_lost_twice_ends_the_sample_with_the_turns_before(renderer: Renderer) -> None:
    """Unjudged. A sample that has tokens does not fail its group."""
    lost = [MissingImageError("gone"), MissingImageError("gone again")]
    policy = ScriptedPolicy(renderer, [("one" + END, 4), *lost])
    episode = await play(make_player(renderer, policy), make_prompt("TwoTurns"))
    assert (episode.finish_reason, episode.error, episode.text) == ("error", "gone again", "one")
    assert not episode.needs_verdict
    with pytest.raises(MissingImageError, match="gone again"):
        await play(make_player(renderer, ScriptedPolicy(renderer, lost)), make_prompt())


@pytest.mark.parametrize(
    ("failure", "ending"),
    [(InvalidRequestError("an image is too large"), "error"), (UnavailableError("the bus is away"), "deadline")],
)
async def test_an_observation_whose_image_cannot_be_stored_ends_its_sample(
    renderer: Renderer, failure: PenstockError, ending: str
) -> None:
    """Not its group: what an environment shows may depend on what the policy said."""

    class FullShelf(ImageShelf):
        async def put(self, scope: str, data: bytes) -> str:
            if self.num_stored:
                raise failure
            return await super().put(scope, data)

    shelf, prompt = FullShelf(), make_prompt("TwoTurns")
    await shelf.put(prompt.id.scope, PICTURE)
    policy = ScriptedPolicy(renderer, [("one" + END, 4)])
    async with Closings() as closings:
        episode = await make_player(renderer, policy).play(
            prompt, 0, await GroupImages.load(shelf, prompt), SharedRendering(), closings
        )
    assert (episode.finish_reason, episode.text) == (ending, "one")
