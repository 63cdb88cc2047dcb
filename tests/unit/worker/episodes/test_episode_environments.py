"""Environments that misbehave: the sample ends by kind, with a reason; before a sample has tokens, its group does."""

import asyncio
import math
import re
from typing import Any

import pytest

from penstock.bus.image_store import hash_of
from penstock.environments import Observation, StepResult, Task
from penstock.errors import DeadlineError, InvalidRequestError, OverloadedError, PoisonError, UnavailableError
from penstock.model.chat.chat_template import Renderer
from penstock.records import Limits, Message, TextPart
from services.rollout.worker.episodes.episode import Episode
from tests.support.worker.scripted_episodes import (
    DONE,
    END,
    PICTURE,
    SECOND_PICTURE,
    Scripted,
    ScriptedPolicy,
    make_player,
    make_prompt,
    play,
    shows,
)

TOOL = {"type": "function", "function": {"name": "zoom", "parameters": {"type": "object"}}}


async def play_one(renderer: Renderer, **changes: Any) -> Episode:
    """Play the script with a policy of two turns."""
    policy = ScriptedPolicy(renderer, [("one" + END, 4), ("two" + END, 4)])
    return await play(make_player(renderer, policy), make_prompt("Scripted", **changes))


async def rewards(_: Task) -> StepResult:
    """An answer with a reward that is no number."""
    return StepResult(observation=None, reward=math.nan)


async def measures(_: Task) -> StepResult:
    """An answer with a metric that is no number."""
    return StepResult(observation=None, metrics={"distance": math.inf})


async def counts(_: Task) -> StepResult:
    """An answer with a reward and a metric that no float can hold."""
    return StepResult(observation=None, reward=10**5000, metrics={"calls": 10**5000})


async def leaves(_: Task) -> StepResult:
    """As argparse does."""
    raise SystemExit(2)


class Panic(BaseException):
    """As pyo3 raises one for a panic of Rust code."""


async def panics(_: Task) -> StepResult:
    """As a library of Rust does."""
    raise Panic("index out of bounds")


async def cancels_what_it_awaits(_: Task) -> StepResult:
    """As a library does that ends its own tasks."""
    waiting = asyncio.create_task(asyncio.sleep(60.0))
    asyncio.get_running_loop().call_soon(waiting.cancel)
    await waiting
    raise AssertionError


def observed(*messages: Message, **rest: Any) -> StepResult:
    """An answer with these messages."""
    return StepResult(observation=Observation(messages=messages, **rest))


def said(role: Any, text: str = "?") -> Message:
    """A message of text."""
    return Message(role=role, parts=(TextPart(text=text),))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (rewards, "ValueError: reward = nan must be a finite number"),
        (measures, "ValueError: metrics distance = inf must be finite numbers"),
        (counts, "ValueError: reward = an integer of 16610 bits must be a finite number"),
        (observed(said("user"), tools=(TOOL,)), "ValueError: it shows 1 tools after the first turn"),
        (observed(said("system")), r"ValueError: it answers a turn with messages of roles \['system'\]; answer with"),
        (observed(said("assistant")), r"ValueError: .* roles \['assistant'\]"),
        (observed(), r"ValueError: .* roles \[\]; .* or end the episode with observation=None"),
        (None, "TypeError: its step returned NoneType; return a StepResult"),
        (shows("Look.", b"no picture"), r"InvalidRequestError: images\[0\] \(10 bytes\) cannot be decoded"),
        (KeyError("tool"), "KeyError: 'tool'"),
        (leaves, r"RuntimeError: SystemExit\(2\)"),
        (panics, r"RuntimeError: Panic\('index out of bounds'\)"),
        (cancels_what_it_awaits, "RuntimeError: CancelledError came out of it, and nobody has cancelled it"),
    ],
)
async def test_a_bad_answer_ends_its_sample_unjudged(renderer: Renderer, answer: Any, reason: str) -> None:
    """What it raises may depend on what the policy said, so its group is not played again; its tokens stay."""
    Scripted.plays(answer)
    episode = await play_one(renderer)
    assert (episode.finish_reason, episode.text, episode.needs_verdict) == ("error", "one", False)
    assert episode.error.startswith("environment 'Scripted': ")
    assert re.search(reason, episode.error)
    assert episode.to_sample(None).reward is None
    assert Scripted.num_closed == 1


async def test_a_picture_of_any_buffer_is_shown(renderer: Renderer) -> None:
    """As an image library may hold it."""
    buffer: Any = bytearray(SECOND_PICTURE)
    Scripted.plays(shows("Look.", buffer), DONE)
    episode = await play_one(renderer)
    assert (episode.finish_reason, episode.error) == ("stop", "")
    assert episode.trajectory.images == [hash_of(PICTURE), hash_of(SECOND_PICTURE)]


async def test_a_template_that_cannot_continue_ends_the_sample_unjudged(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is the template's own."""

    def refuse(*_: Any, **__: Any) -> list[int]:
        raise InvalidRequestError("the model's chat template refuses messages of roles user, assistant, tool: no tools")

    monkeypatch.setattr(Renderer, "render_continuation", refuse)
    Scripted.plays(shows("9", role="tool"))
    episode = await play_one(renderer)
    assert (episode.finish_reason, episode.text) == ("error", "one")
    assert "refuses messages of roles user, assistant, tool: no tools" in episode.error


async def test_a_reset_that_fails_is_tried_with_new_environments(renderer: Renderer) -> None:
    """No token depends on it yet; the failed ones are closed."""
    Scripted.plays(DONE, resets=[RuntimeError("not yet"), None])
    episode = await play_one(renderer)
    assert (episode.finish_reason, Scripted.num_made, Scripted.num_closed) == ("stop", 3, 3)


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (RuntimeError("no board"), PoisonError),
        (KeyError("board"), PoisonError),
        (ConnectionRefusedError("the tool server is away"), UnavailableError),
        (TimeoutError("the tool server is slow"), UnavailableError),
    ],
)
async def test_a_reset_that_goes_on_failing_gives_up_by_kind(
    renderer: Renderer, failure: Exception, kind: type[Exception]
) -> None:
    """A bug is given up with its reason, which the trainer is told; what may come back is waited for on the bus."""
    Scripted.plays(resets=[failure] * 3)
    with pytest.raises(kind, match=rf"environment 'Scripted': {type(failure).__name__}: .*; its reset failed 3 times"):
        await play_one(renderer)
    assert Scripted.num_made == Scripted.num_closed == 3


@pytest.mark.parametrize("failure", [InvalidRequestError("the row has no board"), UnavailableError("no room")])
async def test_an_error_of_ours_in_a_reset_keeps_its_meaning(renderer: Renderer, failure: Exception) -> None:
    """An environment can say that its row will never be played, or may be later."""
    Scripted.plays(resets=[failure])
    with pytest.raises(type(failure), match=str(failure)):
        await play_one(renderer)
    assert Scripted.num_made == Scripted.num_closed == 1


async def test_waiting_for_room_at_a_server_is_no_time_of_the_episode(renderer: Renderer) -> None:
    """It waits longer than the whole episode may take, and is played."""
    Scripted.plays(DONE, resets=[OverloadedError("its server has no room")] * 4)
    sample = await play_one(renderer, limits=Limits(episode_timeout_s=1.0))
    assert sample.finish_reason == "stop"
    assert Scripted.num_made == Scripted.num_closed == 5


async def test_a_server_that_never_has_room_puts_the_group_back(renderer: Renderer) -> None:
    """After the wait of a turn that finds no replica."""
    Scripted.plays(resets=[OverloadedError("its server has no room")] * 9)
    with pytest.raises(OverloadedError, match="its server has no room"):
        await play(make_player(renderer, ScriptedPolicy(renderer, []), wait_timeout_s=0.2), make_prompt("Scripted"))
    assert Scripted.num_made == Scripted.num_closed


async def test_a_reset_that_never_returns_ends_at_the_episodes_deadline(renderer: Renderer) -> None:
    """The group is given another delivery, and then up."""

    async def hang(_: Task) -> Observation:
        await asyncio.Event().wait()
        raise AssertionError

    Scripted.plays(resets=[hang])
    with pytest.raises(DeadlineError, match=r"the reset of environment 'Scripted' took longer .* worker\.episode_time"):
        await play_one(renderer, limits=Limits(episode_timeout_s=0.1))
    assert Scripted.num_closed == 1


async def test_a_first_observation_of_another_type_is_a_bug(renderer: Renderer) -> None:
    """Said in words."""
    Scripted.plays(resets=["Find x."] * 3)
    with pytest.raises(PoisonError, match="TypeError: its reset returned str; return an Observation"):
        await play_one(renderer)


async def test_tools_that_the_template_drops_are_refused(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy would never hear of them."""
    Scripted.plays(DONE)
    assert (await play_one(renderer, tools=(TOOL,))).finish_reason == "stop"
    monkeypatch.setitem(vars(renderer._probe), "takes_tools", False)
    Scripted.plays(DONE)
    with pytest.raises(InvalidRequestError, match="does not show tools, so the policy would not know"):
        await play_one(renderer, tools=(TOOL,))


async def test_tools_of_a_row_are_in_its_prompt(renderer: Renderer) -> None:
    """As the template writes them."""
    Scripted.plays(DONE)
    policy = ScriptedPolicy(renderer, [("one" + END, 4)])
    await play(make_player(renderer, policy), make_prompt("Scripted", tools=(TOOL,)))
    assert '"name": "zoom"' in renderer.decode(policy.requests[0].input_ids)
