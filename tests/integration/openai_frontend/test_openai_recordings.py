"""Calls for training: kept with ids, images and logprobs, or the call fails."""

import base64
import contextlib
import math
from pathlib import Path

import msgspec
import numpy as np
import openai
import pytest

from penstock.bus import kept_stream
from penstock.bus.connection import connect
from penstock.bus.local_server import local_server
from penstock.bus.recordings import Recordings
from penstock.config import BusConfig
from penstock.errors import UnavailableError
from penstock.records import RecordedCall, Verdict, VersionSpan
from penstock.v1 import common_pb2, generate_pb2
from tests.support.router.openai_harness import HI, PNG, Harness, data_url
from tests.support.waiting import until

RECORD = {"record": True}


async def test_a_recorded_call_has_all_that_training_needs(harness: Harness) -> None:
    """What the engine was asked and said, as the client saw it; any router returns it."""
    ids = harness.says("a😀 END more")
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(PNG)}}]}]
    answer = await harness.chat(messages, stop="END", n=2, extra_headers={"x-penstock-record": "needs"})
    assert answer.penstock["is_recorded"]
    num_kept = next(count for count in range(len(ids)) if "END" in harness.renderer.decode(ids[:count]))
    for router in range(2):
        calls = await harness.recordings("needs", router)
        assert [call["choice"] for call in calls] == [0, 1]
        for call, spans in zip(calls, answer.penstock["policy_version_spans"], strict=True):
            assert call["request_id"] == answer.id
            assert call["prompt_token_ids"] == list(harness.requests[0].input_ids)
            assert [base64.b64decode(image) for image in call["images"]] == [PNG]
            assert call["token_ids"] == ids[:num_kept]
            assert call["token_logprobs"] == [-(index + 1) / 64 for index in range(num_kept)]
            assert call["policy_version_spans"] == spans
            assert (call["finish_reason"], call["text"], call["temperature"]) == ("stop", "a😀 ", 0.5)


async def test_calls_of_a_session_come_back_in_their_order_whichever_routers_played_them(harness: Harness) -> None:
    """And those of others do not; pages go on where the last ended."""
    session = "order/of é"
    for index in range(6):
        harness.says(f"answer {index}")
        client = harness.clients[index % 2]
        await client.chat.completions.create(model=harness.run, messages=HI, user=session, extra_body=RECORD)
        await client.chat.completions.create(model=harness.run, messages=HI, user="another", extra_body=RECORD)
        await client.chat.completions.create(model=harness.run, messages=HI, user=session)
    calls = await harness.recordings("order%2Fof%20%C3%A9", 1)
    assert [call["text"] for call in calls] == [f"answer {index}" for index in range(6)]
    page = await harness.recordings("order%2Fof%20%C3%A9", limit=4)
    rest = await harness.recordings("order%2Fof%20%C3%A9", after=page[-1]["number"])
    assert [*page, *rest] == calls


async def test_a_logprob_that_is_not_finite_is_null_and_never_recorded(harness: Harness) -> None:
    """Nobody can train on it. The call that asked for the record fails, with an event in a stream."""

    def broken(request: generate_pb2.GenerateRequest, replica: common_pb2.Replica) -> generate_pb2.GenerateResponse:
        answer = say(request, replica)
        answer.logprobs[-1] = math.nan
        return answer

    harness.says("ab")
    say = harness.engines[0].answer
    for engine in harness.engines:
        engine.answer = broken
    answer = await harness.chat(logprobs=True)
    assert answer.choices[0].logprobs.content[-1].logprob is None
    asked = {"user": "broken", "extra_body": RECORD}
    with pytest.raises(openai.InternalServerError, match="a logprob is not finite, so the call cannot be recorded"):
        await harness.chat(**asked)
    with pytest.raises(openai.APIError, match="a logprob is not finite, so the call cannot be recorded"):
        async for _ in await harness.chat(stream=True, **asked):
            pass
    assert await harness.recordings("broken") == []


async def test_a_page_is_bounded_in_bytes(harness: Harness) -> None:
    """Each call repeats the images of its conversation: a page ends before it is too large, with one call at least."""
    image = PNG + bytes(2**19)
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(image)}}]}
    for _ in range(3):
        await harness.chat([message], user="images", extra_body=RECORD)
    recordings = Recordings(harness.bus)
    whole = await recordings.read("images")
    assert (len(whole.calls), whole.has_more) == (3, False)
    numbers, after = [], 0
    while (page := await recordings.read("images", after=after, max_bytes=int(2.5 * len(image)))).calls:
        assert len(page.calls) == (2 if not numbers else 1)
        assert page.has_more == (not numbers)
        numbers += [number for number, _ in page.calls]
        after = numbers[-1]
    assert numbers == [number for number, _ in whole.calls]
    [(first, _)] = (await recordings.read("images", max_bytes=1)).calls
    assert first == numbers[0]
    assert base64.b64decode((await harness.recordings("images"))[2]["images"][0]) == image


async def test_a_page_has_at_most_16_mib_where_nobody_says_otherwise(harness: Harness) -> None:
    """A router holds it in memory, and sends it as base64."""
    recordings = Recordings(harness.bus)
    await harness.chat(user="plain", extra_body=RECORD)
    [(_, plain)] = (await recordings.read("plain")).calls
    for choice, num_bytes in enumerate((2**23 - 4096, 2**23 - 4096, 8192), start=1):
        call = msgspec.structs.replace(plain, session="large", choice=choice, images=(bytes(num_bytes),))
        await recordings.keep(call)
    page = await recordings.read("large")
    assert ([call.choice for _, call in page.calls], page.has_more) == ([1, 2], True)


async def test_a_stream_ends_when_its_call_is_kept(harness: Harness) -> None:
    """Whoever saw the end finds the call."""
    ids = harness.says("streamed")
    stream = await harness.chat(stream=True, user="stream", extra_body=RECORD)
    async for chunk in stream:
        if chunk.choices[0].finish_reason:
            [call] = await harness.recordings("stream")
            assert call["token_ids"] == ids


async def test_a_completion_is_recorded_too(harness: Harness) -> None:
    """With the ids that were sent."""
    await harness.client.completions.create(
        model=harness.run, prompt=[5, 6, 7], user="completion", max_tokens=2, extra_body=RECORD
    )
    [call] = await harness.recordings("completion")
    assert (call["prompt_token_ids"], len(call["token_ids"]), call["finish_reason"]) == ([5, 6, 7], 2, "length")


async def test_records_are_samples(harness: Harness) -> None:
    """Processes of the run read them from the bus, and make of each what the trainer takes."""
    ids = harness.says("sample")
    await harness.chat(user="sample", extra_body=RECORD)
    [(_, call)] = (await Recordings(harness.bus).read("sample")).calls
    sample = call.to_sample(Verdict(score=1.0, status="OK", extracted="", method="EXACT"), ())
    [sequence] = sample.sequences
    num_prompt = len(harness.requests[0].input_ids)
    assert sequence.token_ids.tolist() == [*harness.requests[0].input_ids, *ids]
    assert sequence.loss_mask.tolist() == [False] * num_prompt + [True] * len(ids)
    assert sequence.logprobs[num_prompt:].tolist() == [-(index + 1) / 64 for index in range(len(ids))]


async def test_a_session_can_be_forgotten(harness: Harness) -> None:
    """It alone."""
    for session in ("forgotten", "remembered"):
        await harness.chat(user=session, extra_body=RECORD)
    async with harness.http() as client:
        assert (await client.delete("/v1/penstock/recordings/forgotten")).status_code == 200
    assert await harness.recordings("forgotten") == []
    assert len(await harness.recordings("remembered")) == 1


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_call_that_cannot_be_kept_fails(harness: Harness, is_streamed: bool) -> None:
    """The recordings are full: nothing is lost in silence, and nothing older makes room."""
    session = f"full-{is_streamed}"
    await harness.chat(user="before", extra_body=RECORD)
    recordings = Recordings(harness.bus)
    await recordings.ensure(max_age_s=3600.0, max_bytes=1000)
    num_before = len(await harness.recordings("before"))
    try:
        with pytest.raises(openai.APIError, match="not recorded, the recordings are full") as caught:
            await harness.chat_to_the_end(user=session, stream=is_streamed, extra_body=RECORD)
        assert is_streamed or isinstance(caught.value, openai.RateLimitError)
        assert await harness.recordings(session) == []
        assert len(await harness.recordings("before")) == num_before
        assert (await harness.chat()).choices[0].message.content == "fine"
    finally:
        await recordings.ensure(max_age_s=3600.0, max_bytes=2**30)
    await harness.chat(user=session, extra_body=RECORD)
    assert len(await harness.recordings(session)) == 1


async def test_a_client_that_goes_away_leaves_no_record(harness: Harness) -> None:
    """It never had the answer."""
    harness.says("word " * 200)
    for engine in harness.engines:
        engine.token_s = 0.05
    stream = await harness.chat(stream=True, user="gone", extra_body=RECORD, max_tokens=1000)
    await anext(stream)
    await stream.close()
    await until(lambda: sum(engine.num_running for engine in harness.engines) == 0)
    assert await harness.recordings("gone") == []


async def test_without_a_server_a_call_is_not_kept_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a bounded time."""
    monkeypatch.setattr(kept_stream, "_TIMEOUT_S", 1.0)
    async with contextlib.AsyncExitStack() as stack:
        async with local_server(tmp_path) as url:
            bus = await stack.enter_async_context(connect(BusConfig(url=url), run="r"))
            await Recordings(bus).ensure(max_age_s=1.0, max_bytes=10**6)
        call = RecordedCall(
            session="s", request_id="q", choice=0, created=0.0, input_ids=np.array([1], "<i4"), images=(),
            output_ids=np.array([2], "<i4"), logprobs=np.array([-1], "<f4"),
            version_spans=(VersionSpan(num_tokens=1, policy_version=1),), finish_reason="stop", temperature=1.0,
            top_p=1.0, top_k=0, num_prompt_tokens=1, num_cached_tokens=0, text="",
        )  # fmt: skip
        with pytest.raises(UnavailableError, match="not recorded"):
            await Recordings(bus).keep(call)
