"""Budgets of an episode: what does not fit ends it, and nothing of it is appended."""

import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from penstock.bus.image_store import hash_of
from penstock.environments import Observation, StepResult
from penstock.errors import InvalidRequestError, PromptTooLongError
from penstock.model.chat.chat_template import Renderer
from penstock.model.families.qwen_vl import ImageGrid
from penstock.records import Limits, Message, TextPart
from services.rollout.worker.environments.hosting.messages import ObservationTooLargeError
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
    picture,
    play,
    shows,
)

THIRD_PICTURE = picture(form="WEBP")
NUM_PIXELS = 96 * 96
"""Of each of the pictures."""


@pytest.fixture
def grid(tiny_model_path: Path) -> ImageGrid:
    """How the tiny model cuts images."""
    return ImageGrid.of(tiny_model_path)


async def play_within(
    renderer: Renderer, grid: ImageGrid, *answers: Any, context_length: int | None = None, **limits: Any
) -> tuple[Episode, ScriptedPolicy]:
    """Play with an environment that answers so, within limits."""
    Scripted.plays(*answers)
    policy = ScriptedPolicy(renderer, [(f"turn {number}" + END, 4) for number in range(3)])
    player = make_player(renderer, policy, grid=grid, context_length=context_length)
    return await play(player, make_prompt("Scripted", limits=Limits(**limits))), policy


def num_sent(policy: ScriptedPolicy, number: int) -> int:
    """Tokens of a request, its pictures expanded."""
    request = policy.requests[number]
    return len(request.input_ids) + 8 * len(request.images)


def require_nothing_appended(episode: Episode, policy: ScriptedPolicy, *, ended_by: str) -> None:
    """The sample ended as truncated by this limit, and has its prompt and its only turn, and nothing of what came
    then."""
    [request] = policy.requests
    sample = episode.to_sample(None)
    assert (sample.finish_reason, sample.error) == ("length", "")
    assert ended_by in sample.ended_by
    assert episode.trajectory.token_ids == [*request.input_ids, *policy.ids("turn 0" + END)]
    assert episode.trajectory.images == [hash_of(PICTURE)]


@pytest.mark.parametrize("images", [(), (SECOND_PICTURE,)])
async def test_observations_may_have_so_many_tokens(
    renderer: Renderer, grid: ImageGrid, images: tuple[bytes, ...]
) -> None:
    """To the token, images expanded; the prompt is none of them."""
    shown = shows("Look.", *images)
    _, free = await play_within(renderer, grid, shown, DONE)
    num_tokens = num_sent(free, 1) - num_sent(free, 0) - len(free.ids("turn 0" + END))
    episode, policy = await play_within(renderer, grid, shown, DONE, max_observation_tokens=num_tokens)
    assert (episode.finish_reason, len(policy.requests)) == ("stop", 2)
    require_nothing_appended(
        *await play_within(renderer, grid, shown, max_observation_tokens=num_tokens - 1),
        ended_by=f"{num_tokens} tokens, but max_observation_tokens leaves room for {num_tokens - 1}",
    )
    episode, policy = await play_within(renderer, grid, shown, shown, max_observation_tokens=2 * num_tokens - 1)
    assert (episode.finish_reason, len(policy.requests)) == ("length", 2)


async def test_a_sequence_may_have_so_many_tokens(renderer: Renderer, grid: ImageGrid) -> None:
    """Every turn is asked for no more than what is left, and the last one may take it all."""
    _, free = await play_within(renderer, grid, shows("Look.", SECOND_PICTURE), DONE)
    most = num_sent(free, 1) + 16
    episode, policy = await play_within(renderer, grid, shows("Look.", SECOND_PICTURE), DONE, max_tokens=most)
    assert episode.finish_reason == "stop"
    asked_for = [request.sampling.max_new_tokens for request in policy.requests]
    assert asked_for == [min(32, most - num_sent(policy, 0)), 16]
    require_nothing_appended(
        *await play_within(renderer, grid, shows("Look.", SECOND_PICTURE), max_tokens=most - 1),
        ended_by="tokens, but max_tokens leaves room for",
    )


async def test_the_first_turn_is_asked_for_what_is_left(renderer: Renderer, grid: ImageGrid) -> None:
    """The prompt's tokens are known before an engine has counted them; a prompt that leaves nothing is refused."""
    _, free = await play_within(renderer, grid, DONE)
    num_said = len(free.ids("turn 0" + END))
    episode, policy = await play_within(renderer, grid, DONE, max_tokens=num_sent(free, 0) + num_said)
    assert (episode.finish_reason, policy.requests[0].sampling.max_new_tokens) == ("stop", num_said)
    with pytest.raises(PromptTooLongError, match=r"'Scripted' begins with \d+ tokens, but max_tokens leaves room for"):
        await play_within(renderer, grid, DONE, max_tokens=num_sent(free, 0))
    with pytest.raises(PromptTooLongError, match="but the context leaves room for"):
        await play_within(renderer, grid, DONE, context_length=num_sent(free, 0))


@pytest.mark.parametrize(
    ("enough", "too_few"),
    [
        ({"max_images": 2}, {"max_images": 1}),
        ({"max_pixels": 2 * NUM_PIXELS}, {"max_pixels": 2 * NUM_PIXELS - 1}),
    ],
)
async def test_an_episode_may_show_so_many_images_and_pixels(
    renderer: Renderer, grid: ImageGrid, enough: dict[str, int], too_few: dict[str, int]
) -> None:
    """The prompt's are among them."""
    answers = (shows("Look.", SECOND_PICTURE), shows("Look again.", THIRD_PICTURE))
    [(name, most)] = too_few.items()
    unit = name.removeprefix("max_")
    require_nothing_appended(
        *await play_within(renderer, grid, *answers, **too_few), ended_by=f"{unit}, but {name} leaves room for {most}"
    )
    episode, policy = await play_within(renderer, grid, *answers, **enough)
    assert (episode.finish_reason, len(policy.requests)) == ("length", 2)
    assert episode.trajectory.images == [hash_of(PICTURE), hash_of(SECOND_PICTURE)]
    episode, _ = await play_within(renderer, grid, shows("No picture."), DONE, **too_few)
    assert episode.finish_reason == "stop"


async def test_an_observation_is_taken_whole_or_not_at_all(renderer: Renderer, grid: ImageGrid) -> None:
    """Not its text without its second picture."""
    shown = shows("Look.", SECOND_PICTURE, THIRD_PICTURE)
    require_nothing_appended(
        *await play_within(renderer, grid, shown, max_images=2), ended_by="3 images, but max_images leaves room for 2"
    )


def png_header(width: int, height: int) -> bytes:
    """A PNG file that says how large it is and has no pixels."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    head = struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return b"\x89PNG\r\n\x1a\n" + head + struct.pack(">I", 1000) + b"IDAT"


@pytest.mark.parametrize("side", [11_000, 30_000], ids=["beyond our bound", "beyond Pillow's"])
async def test_a_huge_image_ends_the_episode_undecoded(
    renderer: Renderer, grid: ImageGrid, monkeypatch: pytest.MonkeyPatch, side: int
) -> None:
    """Its header is enough; so it is for a picture that is only beyond the row's budget."""

    def decoded(_: Image.Image) -> None:
        raise AssertionError("nothing is decoded here")

    monkeypatch.setattr(Image.Image, "load", decoded)
    require_nothing_appended(
        *await play_within(renderer, grid, shows("Look.", png_header(side, side))),
        ended_by="pixels",
    )
    require_nothing_appended(
        *await play_within(renderer, grid, shows("Look.", png_header(200, 200)), max_pixels=40_000),
        ended_by="max_pixels leaves room for 40000",
    )


async def test_pixels_of_all_observations_count_together(renderer: Renderer, grid: ImageGrid) -> None:
    """A request has at most 100 million, however many turns brought them."""
    answers = (shows("Look.", png_header(7_500, 7_500)), shows("Again.", png_header(7_500, 7_501)))
    episode, policy = await play_within(renderer, grid, *answers)
    assert (episode.finish_reason, len(policy.requests)) == ("length", 2)


async def test_ten_megabytes_of_text_are_never_tokenised(
    renderer: Renderer, grid: ImageGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were every token the longest there is, they would not fit."""
    rendered: list[int] = []
    render = Renderer.render_continuation

    def watched(self: Renderer, last_id: int, messages: Any, **rest: Any) -> list[int]:
        rendered.append(sum(len(part.text) for message in messages for part in message.parts))
        return render(self, last_id, messages, **rest)

    monkeypatch.setattr(Renderer, "render_continuation", watched)
    flood = "10 megabytes. " * (10 * 2**20 // 14)
    require_nothing_appended(
        *await play_within(renderer, grid, shows(flood), context_length=4096),
        ended_by="bytes of text, but the context leaves room for",
    )
    assert rendered == []
    most = renderer.longest_token_bytes * 2000
    require_nothing_appended(
        *await play_within(renderer, grid, shows("a" * (most + 1)), max_observation_tokens=2000),
        ended_by=f"{most + 1} bytes of text, but max_observation_tokens leaves room for {most}",
    )
    assert rendered == []
    await play_within(renderer, grid, shows("a" * most), DONE, max_observation_tokens=2000)
    assert rendered == [most]


async def test_a_prompt_of_ten_megabytes_is_refused(renderer: Renderer, grid: ImageGrid) -> None:
    """There is no sample yet that could end."""
    flood = Observation(messages=(Message(role="user", parts=(TextPart(text="10 megabytes. " * (10 * 2**20 // 14)),)),))
    Scripted.plays(resets=[flood])
    player = make_player(renderer, ScriptedPolicy(renderer, []), grid=grid, context_length=4096)
    with pytest.raises(InvalidRequestError, match=r"begins with \d{8} bytes of text, but the context leaves room"):
        await play(player, make_prompt("Scripted", images=(), messages=flood.messages))
    Scripted.plays(resets=[ObservationTooLargeError("the text of an observation has 10485760 characters")])
    with pytest.raises(PromptTooLongError, match="'Scripted' begins too large: the text of an observation has"):
        await play(player, make_prompt("Scripted"))
    assert Scripted.num_made == 1


async def test_so_many_turns_may_be_played(renderer: Renderer, grid: ImageGrid) -> None:
    """Without a limit, the environment ends its episode."""
    answers: list[StepResult] = [shows("1"), shows("2"), DONE]
    episode, policy = await play_within(renderer, grid, *answers)
    assert (episode.finish_reason, len(policy.requests)) == ("stop", 3)
    episode, policy = await play_within(renderer, grid, *answers, max_turns=2)
    assert (episode.finish_reason, len(policy.requests)) == ("environment", 2)
    assert episode.trajectory.token_ids[-len(policy.ids("turn 1" + END)) :] == policy.ids("turn 1" + END)


async def test_a_turn_may_take_so_long(renderer: Renderer) -> None:
    """It then ends with the tokens that came."""
    policy = ScriptedPolicy(renderer, [("one", 4)], hang=True)
    episode = await play(make_player(renderer, policy), make_prompt(limits=Limits(turn_timeout_s=0.1)))
    assert episode.finish_reason == "deadline"


@pytest.mark.parametrize(("row_s", "worker_s"), [(1.5, 900.0), (900.0, 1.5)])
async def test_an_episode_may_take_so_long(renderer: Renderer, row_s: float, worker_s: float) -> None:
    """A row may ask for less than the operator allows, never for more."""
    policy = ScriptedPolicy(renderer, [("one" + END, 4)])
    player = make_player(renderer, policy, episode_timeout_s=worker_s)
    episode = await play(player, make_prompt("Stuck", limits=Limits(episode_timeout_s=row_s)))
    assert (episode.finish_reason, episode.text) == ("deadline", "one")
    assert episode.ended_by.startswith("the environment's step took longer than the episode has; see worker.episode_")


def test_a_limit_of_nothing_is_refused() -> None:
    """None is no limit; 0 would play nothing."""
    with pytest.raises(ValueError, match="max_images = 0 must be above 0, or None for no limit"):
        Limits(max_images=0)
