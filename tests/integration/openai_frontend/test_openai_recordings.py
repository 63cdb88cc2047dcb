"""Calls that are to be trained on: kept with ids, images and logprobs, or the call fails."""

import base64
import contextlib
from pathlib import Path

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
from tests.support.router.openai_stage import HI, PNG, Stage, data_url
from tests.support.waiting import until

RECORD = {"record": True}


async def test_a_recorded_call_has_all_that_training_needs(stage: Stage) -> None:
    """What the engine was asked and said, as the client saw it; any router returns it."""
    ids = stage.says("a😀 END more")
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(PNG)}}]}]
    answer = await stage.chat(messages, stop="END", n=2, extra_headers={"x-penstock-record": "needs"})
    assert answer.penstock["is_recorded"]
    num_kept = next(count for count in range(len(ids)) if "END" in stage.renderer.decode(ids[:count]))
    for router in range(2):
        calls = await stage.recordings("needs", router)
        assert [call["choice"] for call in calls] == [0, 1]
        for call, spans in zip(calls, answer.penstock["policy_version_spans"], strict=True):
            assert call["request_id"] == answer.id
            assert call["prompt_token_ids"] == list(stage.requests[0].input_ids)
            assert [base64.b64decode(image) for image in call["images"]] == [PNG]
            assert call["token_ids"] == ids[:num_kept]
            assert call["token_logprobs"] == [-(index + 1) / 64 for index in range(num_kept)]
            assert call["policy_version_spans"] == spans
            assert (call["finish_reason"], call["text"], call["temperature"]) == ("stop", "a😀 ", 0.5)


async def test_calls_of_a_session_come_back_in_their_order_whichever_routers_played_them(stage: Stage) -> None:
    """And those of others do not; pages go on where the last ended."""
    session = "order/of é"
    for index in range(6):
        stage.says(f"answer {index}")
        client = stage.clients[index % 2]
        await client.chat.completions.create(model=stage.run, messages=HI, user=session, extra_body=RECORD)
        await client.chat.completions.create(model=stage.run, messages=HI, user="another", extra_body=RECORD)
        await client.chat.completions.create(model=stage.run, messages=HI, user=session)
    calls = await stage.recordings("order%2Fof%20%C3%A9", 1)
    assert [call["text"] for call in calls] == [f"answer {index}" for index in range(6)]
    page = await stage.recordings("order%2Fof%20%C3%A9", limit=4)
    rest = await stage.recordings("order%2Fof%20%C3%A9", after=page[-1]["number"])
    assert [*page, *rest] == calls


async def test_a_page_is_bounded_in_bytes(stage: Stage) -> None:
    """Each call repeats the images of its conversation: a page ends before it is too large, with one call at least."""
    image = PNG + bytes(2**19)
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(image)}}]}
    for _ in range(3):
        await stage.chat([message], user="images", extra_body=RECORD)
    recordings = Recordings(stage.bus)
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
    assert base64.b64decode((await stage.recordings("images"))[2]["images"][0]) == image


async def test_a_stream_ends_when_its_call_is_kept(stage: Stage) -> None:
    """Whoever saw the end finds the call."""
    ids = stage.says("streamed")
    stream = await stage.chat(stream=True, user="stream", extra_body=RECORD)
    async for chunk in stream:
        if chunk.choices[0].finish_reason:
            [call] = await stage.recordings("stream")
            assert call["token_ids"] == ids


async def test_a_completion_is_recorded_too(stage: Stage) -> None:
    """With the ids that were sent."""
    await stage.client.completions.create(
        model=stage.run, prompt=[5, 6, 7], user="completion", max_tokens=2, extra_body=RECORD
    )
    [call] = await stage.recordings("completion")
    assert (call["prompt_token_ids"], len(call["token_ids"]), call["finish_reason"]) == ([5, 6, 7], 2, "length")


async def test_records_are_samples(stage: Stage) -> None:
    """Processes of the run read them from the bus, and make of each what the trainer takes."""
    ids = stage.says("sample")
    await stage.chat(user="sample", extra_body=RECORD)
    [(_, call)] = (await Recordings(stage.bus).read("sample")).calls
    sample = call.to_sample(Verdict(score=1.0, status="OK", extracted="", method="EXACT"), ())
    [sequence] = sample.sequences
    num_prompt = len(stage.requests[0].input_ids)
    assert sequence.token_ids.tolist() == [*stage.requests[0].input_ids, *ids]
    assert sequence.loss_mask.tolist() == [False] * num_prompt + [True] * len(ids)
    assert sequence.logprobs[num_prompt:].tolist() == [-(index + 1) / 64 for index in range(len(ids))]


async def test_a_session_can_be_forgotten(stage: Stage) -> None:
    """It alone."""
    for session in ("forgotten", "remembered"):
        await stage.chat(user=session, extra_body=RECORD)
    async with stage.http() as client:
        assert (await client.delete("/v1/penstock/recordings/forgotten")).status_code == 200
    assert await stage.recordings("forgotten") == []
    assert len(await stage.recordings("remembered")) == 1


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_call_that_cannot_be_kept_fails(stage: Stage, is_streamed: bool) -> None:
    """The recordings are full: nothing is lost in silence, and nothing older makes room."""
    session = f"full-{is_streamed}"
    await stage.chat(user="before", extra_body=RECORD)
    recordings = Recordings(stage.bus)
    await recordings.ensure(max_age_s=3600.0, max_bytes=1000)
    num_before = len(await stage.recordings("before"))
    try:
        with pytest.raises(openai.APIError, match="not recorded, the recordings are full") as caught:
            await stage.chat_to_the_end(user=session, stream=is_streamed, extra_body=RECORD)
        assert is_streamed or isinstance(caught.value, openai.RateLimitError)
        assert await stage.recordings(session) == []
        assert len(await stage.recordings("before")) == num_before
        assert (await stage.chat()).choices[0].message.content == "fine"
    finally:
        await recordings.ensure(max_age_s=3600.0, max_bytes=2**30)
    await stage.chat(user=session, extra_body=RECORD)
    assert len(await stage.recordings(session)) == 1


async def test_a_client_that_goes_away_leaves_no_record(stage: Stage) -> None:
    """It never had the answer."""
    stage.says("word " * 200)
    for engine in stage.engines:
        engine.token_s = 0.05
    stream = await stage.chat(stream=True, user="gone", extra_body=RECORD, max_tokens=1000)
    await anext(stream)
    await stream.close()
    await until(lambda: sum(engine.num_running for engine in stage.engines) == 0)
    assert await stage.recordings("gone") == []


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
