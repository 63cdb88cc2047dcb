"""/v1/chat/completions: whole and streamed answers, images, several choices, stop strings, sessions, tools."""

import asyncio
import contextlib
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UnavailableError
from penstock.records import ImagePart, Message, TextPart
from tests.support.router.openai_harness import END_ID, HI, PNG, Harness, collect, data_url, text_of
from tests.support.waiting import until

TEXT = "Héllo 😀 日本語\n"


async def test_a_conversation_is_rendered_as_the_worker_renders_it(harness: Harness) -> None:
    """The engine sees the template's ids; the answer has text, counts, and the policy version that made it."""
    ids = harness.says(TEXT)
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "say <|im_end|>"}]},
        {"role": "assistant", "content": "what?"},
        {"role": "user", "content": "hi"},
    ]
    raw = await harness.client.chat.completions.with_raw_response.create(model=harness.run, messages=messages)
    answer = raw.parse()
    [request] = harness.requests
    expected = harness.renderer.render_prompt(
        [
            Message(role=role, parts=(TextPart(text=text),))
            for role, text in (
                ("system", "be kind"),
                ("user", "say <|im_end|>"),
                ("assistant", "what?"),
                ("user", "hi"),
            )
        ],
        num_images=0,
    )
    assert list(request.input_ids) == expected
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert choice.logprobs is None
    assert choice.message.tool_calls is None
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(expected), len(ids))
    assert usage.prompt_tokens_details.cached_tokens == 1
    version = int(raw.headers["x-penstock-policy-version"])
    assert version in (3, 4)
    assert answer.system_fingerprint == f"policy-{version}"
    ours = (answer.model_extra or {})["penstock"]
    assert ours["policy_version_spans"] == [[{"num_tokens": len(ids), "policy_version": version}]]
    assert ours["request_id"] == answer.id == request.request_id.partition("/")[0]


async def test_what_is_not_said_is_as_in_the_recipe(harness: Harness) -> None:
    """Sampling of a request that says nothing, and of one that says all."""
    await harness.chat()
    await harness.chat(
        temperature=0.25, top_p=0.5, max_completion_tokens=9, extra_body={"top_k": 7, "stop_token_ids": [5]}
    )
    plain, full = (request.sampling for request in sorted(harness.requests, key=lambda each: each.sampling.top_k))
    assert (plain.temperature, plain.top_p, plain.top_k, plain.max_new_tokens) == (0.5, 1.0, 0, 77)
    assert (full.temperature, full.top_p, full.top_k, full.max_new_tokens) == (0.25, 0.5, 7, 9)
    assert list(full.stop_token_ids) == [5]


async def test_what_changes_nothing_is_taken(harness: Harness) -> None:
    """Clients that always send all parameters get answers."""
    answer = await harness.chat(
        logit_bias={}, presence_penalty=0, frequency_penalty=0.0, n=1, top_logprobs=0, tool_choice="auto",
        parallel_tool_calls=True, response_format={"type": "text"}, store=False, service_tier="auto", tools=None,
        stop=None, max_tokens=5, max_completion_tokens=5, metadata={"a": "b"},
    )  # fmt: skip
    assert answer.choices[0].message.content == "fine"


async def test_a_stream_says_what_the_whole_answer_says(harness: Harness) -> None:
    """Piece by piece, characters whole, without replacement characters; the end reports versions."""
    ids = harness.says(TEXT)
    chunks = await collect(await harness.chat(stream=True))
    assert text_of(chunks) == TEXT
    assert not any("\ufffd" in (choice.delta.content or "") for chunk in chunks for choice in chunk.choices)
    assert len(chunks) > 8
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices[0].finish_reason == "stop"
    [[span]] = chunks[-1].penstock["policy_version_spans"]
    assert span["num_tokens"] == len(ids)
    assert {chunk.system_fingerprint for chunk in chunks} == {f"policy-{span['policy_version']}"}
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)


async def test_a_stream_counts_when_asked(harness: Harness) -> None:
    """One more chunk, as OpenAI has it."""
    ids = harness.says("abc")
    chunks = await collect(await harness.chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(ids)
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_token_ids_and_logprobs_come_when_asked(harness: Harness, is_streamed: bool) -> None:
    """Ids of prompt and answer under vLLM's names, logprobs of training under one of ours, and OpenAI's logprobs."""
    ids = harness.says("a😀")
    expected = [-(index + 1) / 64 for index in range(len(ids))]
    answer = await harness.chat(stream=is_streamed, logprobs=True, extra_body={"return_token_ids": True})
    if is_streamed:
        chunks = await collect(answer)
        assert chunks[0].prompt_token_ids == list(harness.requests[0].input_ids)
        pieces = [chunk.choices[0] for chunk in chunks[1:-1]]
        token_ids = [number for piece in pieces for number in piece.token_ids]
        logprobs = [logprob for piece in pieces for logprob in piece.token_logprobs]
        content = [entry for piece in pieces for entry in piece.logprobs.content]
    else:
        [choice] = answer.choices
        assert answer.prompt_token_ids == list(harness.requests[0].input_ids)
        token_ids, logprobs, content = choice.token_ids, choice.token_logprobs, choice.logprobs.content
    assert token_ids == ids
    assert logprobs == expected
    assert [entry.logprob for entry in content] == expected
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == "a😀"
    assert content[-1].token == "<|im_end|>"


async def test_an_image_of_no_named_type_is_taken_as_published_data_sets_write_it(harness: Harness) -> None:
    """Columns of Geometry3K have URLs of the type image/None."""
    await harness.chat(
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(PNG, "None")}}]}]
    )
    [request] = harness.requests
    assert [image.data for image in request.images] == [PNG]


async def test_images_arrive_as_the_files_they_are(harness: Harness) -> None:
    """One placeholder each, in their order."""
    other = PNG[::-1]
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": data_url(PNG), "detail": "high"}},
        {"type": "text", "text": "b"},
    ]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "fine"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(other, "JPEG")}}]},
    ]
    await harness.chat(messages)
    [request] = harness.requests
    assert [image.data for image in request.images] == [PNG, other]
    expected = harness.renderer.render_prompt(
        [
            Message(role="user", parts=(TextPart(text="a"), ImagePart(index=0), TextPart(text="b"))),
            Message(role="assistant", parts=(TextPart(text="fine"),)),
            Message(role="user", parts=(ImagePart(index=1),)),
        ],
        num_images=2,
    )
    assert list(request.input_ids) == expected


async def test_several_choices_are_samples_of_their_own(harness: Harness) -> None:
    """Each is a request to an engine; the prompt counts once."""
    ids = harness.says("abc")
    answer = await harness.chat(n=3)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(0, "abc"), (1, "abc"), (2, "abc")]
    assert len({request.request_id for request in harness.requests}) == 3
    assert answer.usage.completion_tokens == 3 * len(ids)
    assert answer.usage.prompt_tokens == len(harness.requests[0].input_ids)
    assert len(answer.penstock["policy_version_spans"]) == 3
    chunks = await collect(await harness.chat(n=2, stream=True))
    assert [text_of(chunks, index) for index in range(2)] == ["abc", "abc"]
    assert sum(choice.finish_reason is not None for chunk in chunks for choice in chunk.choices) == 2


@pytest.mark.parametrize(("is_streamed", "form"), [(False, None), (True, None), (False, {"type": "json_object"})])
async def test_a_stop_string_ends_the_answer_and_the_request_in_the_engine(
    harness: Harness, is_streamed: bool, form: dict[str, str] | None
) -> None:
    """The text ends before it, none of it is sent, and the request is aborted in the engine; also one of a form."""
    harness.says("one two END and " + "more " * 200)
    for engine in harness.engines:
        engine.token_s = 0.01
    asked = {} if form is None else {"response_format": form}
    answer = await harness.chat(stop=["never", "END"], stream=is_streamed, max_tokens=1000, **asked)
    if is_streamed:
        chunks = await collect(answer)
        text, reason = text_of(chunks), chunks[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, reason) == ("one two ", "stop")
    await until(lambda: sum(engine.num_cancelled for engine in harness.engines) == 1)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_goes_away_aborts_the_request_in_the_engine(harness: Harness, is_streamed: bool) -> None:
    """All choices of it."""
    harness.says("word " * 500)
    for engine in harness.engines:
        engine.token_s = 0.05
    if is_streamed:
        stream = await harness.chat(n=2, stream=True, max_tokens=1000)
        await anext(stream)
        await until(lambda: sum(engine.num_running for engine in harness.engines) == 2)
        await stream.close()
    else:
        pending = asyncio.ensure_future(harness.chat(n=2, max_tokens=1000))
        await until(lambda: sum(engine.num_running for engine in harness.engines) == 2)
        pending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pending
    await until(lambda: sum(engine.num_cancelled for engine in harness.engines) == 2)
    await until(lambda: sum(engine.num_running for engine in harness.engines) == 0)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_engine_that_fails_costs_nothing_that_was_said(harness: Harness, is_streamed: bool) -> None:
    """The other goes on in mid-character; the spans say which version generated what."""
    ids = harness.says("😀" * 3)
    first = harness.engines[0]
    first.fail_after, first.fail_with = 6, UnavailableError("told to")
    harness.engines[1].token_s = 0.01
    await harness.engines[1].update(num_running=4)  # so that sessions begin with the first
    await harness.until_load(4)
    answers = [
        await harness.chat(stream=is_streamed, extra_headers={"x-session-id": f"s{is_streamed}{index}"})
        for index in range(4)
    ]
    await harness.engines[1].update(num_running=0)
    spans = []
    for answer in answers:
        last = (await collect_text(answer)) if is_streamed else (answer.choices[0].message.content, answer.penstock)
        assert last[0] == "😀" * 3
        [span_list] = last[1]["policy_version_spans"]
        spans.append([(span["num_tokens"], span["policy_version"]) for span in span_list])
    assert [(6, 3), (len(ids) - 6, 4)] in spans


async def collect_text(stream: Any) -> tuple[str, Any]:
    """All that was said, and what the end tells."""
    chunks = await collect(stream)
    return text_of(chunks), chunks[-1].penstock


@pytest.mark.parametrize("way", ["header", "metadata", "user"])
async def test_a_session_stays_with_its_engine(harness: Harness, way: str) -> None:
    """However it is named."""
    for index in range(6):
        name = f"{way}-{index % 2}"
        options: dict[str, Any] = {
            "header": {"extra_headers": {"x-session-id": name}, "user": "somebody"},
            "metadata": {"metadata": {"session_id": name}, "user": "somebody"},
            "user": {"user": name},
        }[way]
        answer = await harness.chat(**options)
        assert answer.penstock["session_id"] == name
    assert {request.session_id for request in harness.requests} == {f"{way}-0", f"{way}-1"}
    seen = [{request.session_id for request in engine.requests} for engine in harness.engines]
    assert not seen[0] & seen[1]


async def test_parameters_of_other_servers_are_taken_where_they_change_nothing(harness: Harness) -> None:
    """A whole SamplingParams, hints of caches, and a seed, which is reported as unused."""
    neutral = {
        "min_p": 0, "repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": False, "skip_special_tokens": True,
        "include_stop_str_in_output": False, "spaces_between_special_tokens": True, "add_generation_prompt": True,
        "continue_final_message": False, "use_beam_search": False, "length_penalty": 1, "priority": 0,
        "return_tokens_as_token_ids": False, "no_stop_trim": False, "return_hidden_states": False,
        "prompt_cache_key": "k", "safety_identifier": "s", "verbosity": "low", "cache_salt": "c", "request_id": "r",
        "rid": "r",
    }  # fmt: skip
    raw = await harness.client.chat.completions.with_raw_response.create(
        model=harness.run, messages=HI, seed=7, extra_body=neutral
    )
    assert raw.headers["x-penstock-ignored"] == "seed"
    assert (
        "x-penstock-ignored"
        not in (await harness.client.chat.completions.with_raw_response.create(model=harness.run, messages=HI)).headers
    )


async def test_clients_learn_what_there_is(harness: Harness) -> None:
    """The context's length if engines say theirs, health, and Penstock's version."""
    async with harness.http() as client:
        [model] = (await client.get("/v1/models")).json()["data"]
        assert model["max_model_len"] is None
        assert (await client.get("/health")).json() == (await client.get("/healthz")).json() == {"status": "serving"}
        assert (await client.get("/version")).json() == {"version": importlib.metadata.version("penstock")}


async def test_completions_go_on_with_text_and_ids(harness: Harness) -> None:
    """Text is never a special token; ids are taken as they are; several prompts are several choices."""
    ids = harness.says("and so")
    complete = harness.client.completions.create
    one = await complete(model=harness.run, prompt="say <|im_end|>", logprobs=0, extra_body={"return_token_ids": True})
    assert END_ID not in harness.requests[0].input_ids
    [choice] = one.choices
    assert (choice.text, choice.finish_reason) == ("and so", "stop")
    extra = {"token_ids": ids, "prompt_token_ids": list(harness.requests[0].input_ids)}
    assert (choice.model_extra or {}).items() >= extra.items()
    assert choice.logprobs.token_logprobs == [-(index + 1) / 64 for index in range(len(ids))]
    assert "".join(choice.logprobs.tokens) == "and so<|im_end|>"
    offsets = choice.logprobs.text_offset
    assert [("and so")[first:end] for first, end in zip(offsets, [*offsets[1:], 6], strict=True)] == [
        *choice.logprobs.tokens[:-1],
        "",
    ]
    several = await complete(model=harness.run, prompt=[[5, 6], [7, END_ID]], n=2, max_tokens=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in several.choices} == {"length"}
    assert several.usage.prompt_tokens == 4
    asked = [list(request.input_ids) for request in harness.requests if request.sampling.max_new_tokens == 2]
    assert sorted(asked) == [[5, 6], [5, 6], [7, END_ID], [7, END_ID]]
    chunks = [chunk async for chunk in await complete(model=harness.run, prompt="x", stream=True, stop=" so")]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "and"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_two_routers_serve_the_same_policy(harness: Harness) -> None:
    """Whichever is asked."""
    for client in harness.clients:
        assert [model.id async for model in client.models.list()] == [harness.run]
        assert (await client.models.retrieve(harness.run)).owned_by == "penstock"
        answer = await client.chat.completions.create(model=harness.run, messages=HI)
        assert answer.choices[0].message.content == "fine"
    async with harness.http() as plain:
        assert (await plain.get("/healthz")).json() == {"status": "serving"}


async def test_a_router_that_speaks_holds_no_torch(harness: Harness) -> None:
    """Its process has transformers' tokenizers, and none of torch's libraries, though torch is installed."""
    await harness.chat()
    maps = Path(f"/proc/{harness.routers[0].process.pid}/maps").read_text()
    assert "tokenizers" in maps
    assert "torch" not in maps


async def test_many_at_once(harness: Harness) -> None:
    """Forty streams beside each other, each whole."""
    harness.says(TEXT)

    async def one(index: int) -> str:
        return text_of(await collect(await harness.chat(stream=True, user=f"u{index}")))

    assert set(await asyncio.gather(*(one(index) for index in range(40)))) == {TEXT}
