"""SGLang's cumulative responses come out as parts, each token once."""

import asyncio
import base64
from typing import Any

import numpy as np
import pytest

from bench.async_loop import virtual_time
from penstock.errors import InvalidRequestError, UnavailableError
from services.rollout.engine.sglang import token_stream
from services.rollout.engine.sglang.generation import Generation
from services.rollout.engine.sglang.token_stream import TokenStream
from tests.support.waiting import promptly


class Sglang:
    """One request inside SGLang: its responses share lists that go on growing, as SGLang's do."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[tuple[float, int, None]] = []
        self.versions: list[dict[str, Any]] = []

    def make(self, count: int, *, version: int = 1, end: dict[str, Any] | None = None) -> dict[str, Any]:
        """The response after `count` more tokens."""
        start = len(self.ids)
        self.ids += range(start, start + count)
        self.logprobs += [(-token / 8, token, None) for token in range(start, start + count)]
        if self.versions and self.versions[-1]["version"] == str(version):
            self.versions = [*self.versions[:-1], {**self.versions[-1], "end": len(self.ids)}]
        else:
            self.versions = [*self.versions, {"version": str(version), "start": start, "end": len(self.ids)}]
        return {
            "output_ids": self.ids,
            "meta_info": {
                "finish_reason": end,
                "completion_tokens": len(self.ids),
                "prompt_tokens": 9,
                "cached_tokens": 4,
                "output_token_logprobs": self.logprobs,
                "weight_versions": self.versions,
            },
        }


async def drained(stream: TokenStream) -> list[Generation]:
    """All parts to the end."""
    parts = []
    while (part := await stream.take()) is not None:
        parts.append(part)
    return parts


async def test_parts_follow_each_other_without_gap_or_overlap() -> None:
    """Ids, logprobs and spans of each part are those since the part before; only the last says how it ended."""
    sglang, stream, parts = Sglang(), TokenStream(min_tokens=3), []
    for count, version in ((1, 1), (2, 1), (1, 1), (4, 2), (5, 4)):
        stream.put(sglang.make(count, version=version))
        if count != 1:
            parts.append(await stream.take())
    stream.put(sglang.make(1, version=4, end={"type": "stop"}))
    stream.close()
    parts += await drained(stream)
    assert [len(part.output_ids) for part in parts] == [3, 5, 5, 1]
    assert [token for part in parts for token in part.output_ids] == list(range(14))
    assert [logprob for part in parts for logprob in part.logprobs] == [-token / 8 for token in range(14)]
    assert [part.version_spans for part in parts] == [[(3, 1)], [(1, 1), (4, 2)], [(5, 4)], [(1, 4)]]
    assert [part.stopped for part in parts] == [None, None, None, True]
    assert [part.num_tokens_so_far for part in parts] == [3, 8, 13, 14]


async def test_the_first_token_is_delivered_at_once() -> None:
    """Others wait for a prompt's prefill to be over; the parts after it have their size."""
    sglang, stream = Sglang(), TokenStream(min_tokens=64)
    stream.put(sglang.make(1))
    taking = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    assert taking.done(), "no timer has to run out"
    part = taking.result()
    assert part is not None
    assert part.num_tokens_so_far == 1
    stream.put(sglang.make(1))
    taking = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    assert not taking.done()
    stream.close()
    assert await taking is not None


@pytest.mark.parametrize("tokens_per_s", [16, 400])
def test_parts_of_a_long_answer_grow_with_it(tokens_per_s: int) -> None:
    """16,000 tokens are a quarter of the parts of 64, and at 16 tokens a second a tenth of those of a second.

    None holds more than 64 tokens, a second's or one in 16 of those before it. Each token for itself stays so.
    """

    async def play(min_tokens: int) -> list[int]:
        sglang, stream, sizes = Sglang(), TokenStream(min_tokens=min_tokens), []

        async def pump() -> None:
            for _ in range(0, 16_000, 4):
                stream.put(sglang.make(4))
                await asyncio.sleep(4 / tokens_per_s)
            stream.close()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pump())
            while (part := await stream.take()) is not None:
                sizes.append(len(part.output_ids))
        return sizes

    sizes = virtual_time.run(play(64))
    assert sum(sizes) == 16_000
    assert len(sizes) < 90
    for number, size in enumerate(sizes[1:], 1):
        assert size <= max(64, tokens_per_s, sum(sizes[:number]) // token_stream.GROWTH) + 4
    assert virtual_time.run(play(1)) == [4] * 4000


async def test_a_response_holds_what_it_accounts_for_though_its_lists_have_grown() -> None:
    """SGLang has appended a token of which no response told yet."""
    sglang, stream = Sglang(), TokenStream(min_tokens=1)
    stream.put(sglang.make(2))
    sglang.make(1)
    part = await stream.take()
    assert part is not None
    assert part.output_ids == [0, 1]


async def test_a_slow_consumer_gets_more_at_once() -> None:
    """Tokens that came meanwhile are one part."""
    sglang, stream = Sglang(), TokenStream(min_tokens=0)
    for _ in range(5):
        stream.put(sglang.make(1))
    part = await stream.take()
    assert part is not None
    assert len(part.output_ids) == 5
    stream.close()
    assert await stream.take() is None


async def test_a_token_waits_for_others_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than asked for, when nothing more comes."""
    monkeypatch.setattr(token_stream, "MAX_WAIT_S", 0.01)
    sglang, stream = Sglang(), TokenStream(min_tokens=100)
    stream.put(sglang.make(1))
    assert await stream.take() is not None
    stream.put(sglang.make(2))
    part = await promptly(stream.take())
    assert part is not None
    assert len(part.output_ids) == 2


async def test_what_was_put_comes_out_though_the_stream_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that waits for more is woken, gets the rest, and then the end, however often it asks."""
    monkeypatch.setattr(token_stream, "MAX_WAIT_S", 600.0)
    sglang, stream = Sglang(), TokenStream(min_tokens=100)
    stream.put(sglang.make(1))
    assert await stream.take() is not None
    taking = asyncio.create_task(stream.take())
    stream.put(sglang.make(4))
    await asyncio.wait((taking,), timeout=0.01)
    assert not taking.done()
    stream.close()
    part = await promptly(taking)
    assert part is not None
    assert (part.output_ids, part.stopped) == ([1, 2, 3, 4], None)
    assert await stream.take() is None
    assert await stream.take() is None


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        ({"type": "abort", "status_code": 400, "message": "too long"}, InvalidRequestError),
        ({"type": "abort", "status_code": 503, "message": "too long"}, UnavailableError),
        ({"type": "abort", "message": "too long"}, UnavailableError),
    ],
)
async def test_an_aborted_request_is_an_error_after_its_tokens(end: dict[str, Any], kind: type[Exception]) -> None:
    """The tokens before stay good; those of the abort itself are left out."""
    sglang, stream = Sglang(), TokenStream(min_tokens=100)
    stream.put(sglang.make(2))
    with pytest.raises(kind, match="too long"):
        stream.put(sglang.make(1, end=end))
    stream.close()
    assert [part.output_ids for part in await drained(stream)] == [[0, 1]]


async def test_a_response_that_contradicts_itself_is_not_passed_on() -> None:
    """Ids without logprobs, or without a version."""
    for field in ("output_token_logprobs", "weight_versions"):
        sglang, stream = Sglang(), TokenStream(min_tokens=1)
        response = sglang.make(2)
        response["meta_info"][field] = []
        stream.put(response)
        with pytest.raises(RuntimeError, match="is inconsistent"):
            await stream.take()


async def test_the_prompts_scores_come_with_the_first_part_only() -> None:
    """The first prompt token follows nothing and has none; each part has the likeliest ids of its own tokens."""
    sglang, stream = Sglang(), TokenStream(min_tokens=1)
    parts = []
    for count, end in ((1, None), (2, {"type": "length"})):
        response = sglang.make(count, end=end)
        response["meta_info"] |= {
            "prompt_tokens": 3,
            "input_token_logprobs": [(None, 7, None), (-1.0, 8, None), (-2.0, 9, None)],
            "input_top_logprobs": [None, [(-0.5, 1, None), (-1.0, 8, None)], [(-2.0, 9, None), (-3.0, 2, None)]],
            "output_top_logprobs": [[(-token / 8, token, None), (-9.0, 50, None)] for token in sglang.ids],
        }
        stream.put(response)
        if end is None:
            parts.append(await stream.take())
    stream.close()
    parts += await drained(stream)
    first, second = parts
    assert first is not None
    assert second is not None
    assert first.prompt is not None
    assert second.prompt is None
    assert first.prompt.logprobs == [-1.0, -2.0]
    assert [(each.ids, each.logprobs) for each in first.prompt.top] == [([1, 8], [-0.5, -1.0]), ([9, 2], [-2.0, -3.0])]
    assert [each.ids for each in first.top] == [[0, 50]]
    assert [each.logprobs for each in second.top] == [[-1 / 8, -9.0], [-2 / 8, -9.0]]


async def test_a_prompt_that_was_not_scored_as_a_whole_has_no_scores() -> None:
    """Where only outputs are asked for, SGLang may list a logprob of the prompt's last token."""
    sglang, stream = Sglang(), TokenStream(min_tokens=1)
    response = sglang.make(1, end={"type": "length"})
    response["meta_info"]["input_token_logprobs"] = [(None, 7, None)]
    stream.put(response)
    part = await stream.take()
    assert part is not None
    assert part.prompt is None
    assert part.top == []


async def test_the_schedulers_times_are_read_where_sglang_tells_them() -> None:
    """It does with its metrics on: seconds in the queue, and two times between which the prompt was computed."""
    sglang, stream = Sglang(), TokenStream(min_tokens=1)
    response = sglang.make(1)
    stream.put(response)
    silent = await stream.take()
    response = sglang.make(1, end={"type": "stop"})
    response["meta_info"] |= {"queue_time": 0.25, "forward_entry_time": 100.5, "prefill_finished_time": 101.25}
    stream.put(response)
    told = await stream.take()
    assert silent is not None
    assert told is not None
    assert (silent.queued_s, silent.prefill_s) == (None, None)
    assert (told.queued_s, told.prefill_s) == (0.25, 0.75)


async def test_experts_of_the_whole_turn_come_with_its_last_part() -> None:
    """SGLang reports them once, at the end."""
    sglang, stream = Sglang(), TokenStream(min_tokens=1)
    stream.put(sglang.make(2))
    first = await stream.take()
    last = sglang.make(3, end={"type": "stop"})
    last["meta_info"]["routed_experts"] = base64.b64encode(np.arange(5, dtype="<i4").tobytes()).decode()
    stream.put(last)
    stream.close()
    [part] = await drained(stream)
    assert first is not None
    assert first.routed_experts is None
    assert part.routed_experts is not None
    assert part.routed_experts.tolist() == [0, 1, 2, 3, 4]
