"""A sample's result and its environment's end."""

import pytest

from penstock.model.chat.chat_template import Renderer
from services.rollout.worker.closings import Closings
from services.rollout.worker.episodes import beginning
from services.rollout.worker.group_images import GroupImages
from services.rollout.worker.shared_rendering import SharedRendering
from tests.support.image_shelf import ImageShelf
from tests.support.waiting import HANG_S, promptly
from tests.support.worker.lingering import LINGERS, Lingers
from tests.support.worker.scripted_episodes import END, PICTURE, ScriptedPolicy, make_player, make_prompt


async def test_a_sample_has_its_result_before_its_environment_is_closed(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed by the task that reset it: what it holds, as anyio's cancel scopes, may belong to that."""
    monkeypatch.setattr(beginning, "_CLOSE_TIMEOUT_S", 10 * HANG_S)
    Lingers.reset_all()
    prompt, shelf = make_prompt("Lingers"), ImageShelf()
    await shelf.put(prompt.id.scope, PICTURE)
    images = await GroupImages.load(shelf, prompt)
    policy = ScriptedPolicy(renderer, [("one" + END, 4)])
    player = make_player(renderer, policy, environments={"Lingers": LINGERS})
    async with Closings() as closings:
        episode = await promptly(player.play(prompt, 0, images, SharedRendering(), closings))
        assert (episode.finish_reason, episode.reward, Lingers.num_open) == ("stop", 1.0, 1)
        Lingers.may_close.set()
    assert Lingers.num_open == 0
    assert len(Lingers.tasks) == 1
