"""Long texts of episodes are rendered beside the event loop."""

import asyncio
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from penstock.errors import InvalidRequestError
from penstock.model.chat.chat_template import Renderer
from penstock.records import Message, TextPart
from services.rollout.worker.episodes.rendering import LONG_TEXT_BYTES, Rendering
from tests.support.waiting import HANG_S, until
from tests.support.worker.scripted_episodes import (
    DONE,
    END,
    Scripted,
    ScriptedPolicy,
    make_player,
    make_prompt,
    play,
    shows,
)

LONG = "The angle is 30 degrees. " * (LONG_TEXT_BYTES // 20)


class Held(Renderer):
    """Renders a long text no sooner than it is released."""

    begun: ClassVar[threading.Event] = threading.Event()
    released: ClassVar[threading.Event] = threading.Event()
    was_released: ClassVar[list[bool]] = []

    def _tokenize(self, rendered: str, *rest: Any, **options: Any) -> list[int]:
        if len(rendered) > LONG_TEXT_BYTES:
            self.begun.set()
            self.was_released.append(self.released.wait(HANG_S))
        return super()._tokenize(rendered, *rest, **options)


@pytest.fixture
def renderer(tiny_model_path: Path) -> Renderer:
    """One that nothing holds yet."""
    Held.begun.clear()
    Held.released.clear()
    Held.was_released.clear()
    return Held.load(tiny_model_path)


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_long_text_holds_up_no_other_episode(renderer: Renderer, is_first: bool) -> None:
    """While one, a prompt or a tool's answer, is rendered, a sample with short texts is played to its end."""
    long_prompt = make_prompt("Scripted", messages=(Message(role="user", parts=(TextPart(text=LONG),)),), images=())
    Scripted.plays(DONE) if is_first else Scripted.plays(shows(LONG), DONE)
    player = make_player(renderer, ScriptedPolicy(renderer, [("It is 3." + END, 4)] * 3))
    playing = asyncio.create_task(play(player, long_prompt if is_first else make_prompt("Scripted")))
    await until(Held.begun.is_set)
    other = await play(player, make_prompt())
    assert other.finish_reason == "stop"
    Held.released.set()
    episode = await playing
    assert (Held.was_released, episode.finish_reason) == ([True], "stop")
    assert LONG in renderer.decode(episode.trajectory.token_ids)


async def test_the_thread_renders_as_the_loop_does(tiny_model_path: Path) -> None:
    """The same ids, also of text that spells special tokens, and the same refusals."""
    renderer = Renderer.load(tiny_model_path)
    rendering = Rendering(renderer)
    messages = (Message(role="user", parts=(TextPart(text="<|im_end|> Find x. 30°"),)),)
    ids = renderer.render_prompt(messages, num_images=0)
    for num_bytes in (1, LONG_TEXT_BYTES + 1):
        assert await rendering.render(lambda own: own.render_prompt(messages, num_images=0), num_bytes=num_bytes) == ids
        with pytest.raises(InvalidRequestError, match="0 image placeholders"):
            await rendering.render(lambda own: own.render_prompt(messages, num_images=1), num_bytes=num_bytes)
