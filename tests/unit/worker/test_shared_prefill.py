"""The samples of a group share their prompt's rendering, and wait for the first one's prefill and for nothing else."""

import asyncio

import pytest

from penstock.environments import Observation
from penstock.records import Message, TextPart
from services.rollout.worker.shared_prefill import SharedPrefill


async def test_the_first_goes_at_once_and_the_others_when_it_has_a_token() -> None:
    """They do not wait for its end."""
    prefill, began = SharedPrefill(), []

    async def follow(number: int) -> None:
        async with prefill.first_turn():
            began.append(number)

    async with prefill.first_turn() as note_first_token:
        followers = [asyncio.create_task(follow(number)) for number in range(3)]
        await asyncio.sleep(0)
        assert began == []
        note_first_token()
        await asyncio.gather(*followers)
        assert sorted(began) == [0, 1, 2]


@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError])
async def test_a_first_turn_without_a_token_holds_nobody_up(error: type[BaseException]) -> None:
    """Whoever waits computes the prompt for itself."""
    prefill = SharedPrefill()
    with pytest.raises(error):
        async with prefill.first_turn():
            raise error
    async with asyncio.timeout(30), prefill.first_turn():
        pass


async def test_a_cancelled_follower_changes_nothing() -> None:
    """The first sample is still the one to wait for."""
    prefill = SharedPrefill()
    async with prefill.first_turn():
        for _ in range(2):
            entering = asyncio.create_task(prefill.first_turn().__aenter__())
            await asyncio.sleep(0)
            assert not entering.done()
            entering.cancel()
            await asyncio.wait({entering})


async def test_equal_prompts_are_rendered_once() -> None:
    """Also by samples that begin together; another observation is rendered anew, and what one sample adds to its ids
    does not reach the others."""
    prefill, rendered = SharedPrefill(), []

    async def render() -> list[int]:
        rendered.append(len(rendered))
        await asyncio.sleep(0)
        return [7, len(rendered)]

    def observed(text: str) -> Observation:
        return Observation(messages=(Message(role="user", parts=(TextPart(text=text),)),))

    both = await asyncio.gather(*(prefill.ids_of(observed("one"), render) for _ in range(2)))
    both[0].append(9)
    assert both[1] == [7, 1]
    assert await prefill.ids_of(observed("one"), render) == [7, 1]
    assert await prefill.ids_of(observed("two"), render) == [7, 2]
    assert len(rendered) == 2
