"""The samples of a group share their prompt's rendering."""

import asyncio

from penstock.environments import Observation
from penstock.records import Message, TextPart
from services.rollout.worker.shared_rendering import SharedRendering


async def test_equal_prompts_are_rendered_once() -> None:
    """Also by samples that begin together; another observation is rendered anew, and what one sample adds to its ids
    does not reach the others."""
    shared, rendered = SharedRendering(), []

    async def render() -> list[int]:
        rendered.append(len(rendered))
        await asyncio.sleep(0)
        return [7, len(rendered)]

    def observed(text: str) -> Observation:
        return Observation(messages=(Message(role="user", parts=(TextPart(text=text),)),))

    both = await asyncio.gather(*(shared.ids_of(observed("one"), render) for _ in range(2)))
    both[0].append(9)
    assert both[1] == [7, 1]
    assert await shared.ids_of(observed("one"), render) == [7, 1]
    assert await shared.ids_of(observed("two"), render) == [7, 2]
    assert len(rendered) == 2
