"""Sessions of agents: prompts that go on id for id, whichever router answers; all that was said is on the bus."""

import asyncio
import dataclasses
import json
from typing import Any

import openai
import pytest
from PIL import Image

from penstock.bus.image_store import ImageStore, hash_of
from penstock.environments.pictures import read_picture
from penstock.records import Limits, Sampling, SessionId
from penstock.testing.answers import Saying, counting
from services.rollout.worker.agents.linearize import linearize
from tests.support.router.agent_session import agent_session, group_id, state_of
from tests.support.router.openai_harness import END_ID, HI, MODEL_PATH, PNG, Harness, collect, data_url, text_of
from tests.support.router.process import router_process
from tests.support.waiting import promptly, until

TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}},
}
# White space that json.dumps does not put.
CALL = '<tool_call>\n{"name": "add", "arguments": {"b":1,  "a": true}}\n</tool_call>'


def said(answer: Any) -> dict[str, Any]:
    """The answer as agents send it back."""
    return dict(answer.choices[0].message.model_dump(exclude_none=True))


def user(text: str) -> dict[str, Any]:
    """Something that the user says."""
    return {"role": "user", "content": text}


def says_oddly(harness: Harness, text: str) -> list[int]:
    """Have the engines say the text in one token a letter, as no tokeniser would."""
    ids = [number for letter in text for number in harness.renderer.render_text(letter)] + [END_ID]
    for engine in harness.engines:
        engine.answer = Saying(ids)
    return ids


def whole_of(harness: Harness, ids: list[int]) -> list[int]:
    """Prompt and answer of the longest call, which the engines answered with `ids`."""
    return [*max((list(request.input_ids) for request in harness.requests), key=len), *ids]


def count_of(part: list[int], ids: list[int]) -> int:
    """How often these ids stand in the others."""
    return sum(ids[start : start + len(part)] == part for start in range(len(ids)))


async def test_two_routers_in_turn_continue_a_session_id_for_id(harness: Harness) -> None:
    """Each prompt begins with exactly the ids before it, though no tokeniser would choose them for the text."""
    async with agent_session(harness) as agent:
        messages, whole = [*HI], list[int]()
        for turn in range(4):
            ids = says_oddly(harness, f"answer {turn}")
            assert ids[:-1] != harness.renderer.render_text(f"answer {turn}")
            answer = await agent.ask(messages, router=turn % 2)
            now = whole_of(harness, ids)
            assert now[: len(whole)] == whole
            whole = now
            messages += [said(answer), user(f"more {turn}")]
        [sequence] = linearize(await agent.sessions.read(agent.opened.id))
        assert sequence.token_ids.tolist() == whole
        assert [len(call.input_ids) < 40 for call in await agent.calls()] == [True] * 4
        assert {request.group_id for request in harness.requests} == {agent.opened.state.group}


async def test_a_client_with_one_base_url_names_its_session_in_a_header(harness: Harness) -> None:
    """Its calls and those at the session's own URL are one conversation."""
    async with agent_session(harness) as agent:
        by_header = harness.client.with_options(default_headers={"X-Penstock-Session": str(agent.opened.id)})
        ids = says_oddly(harness, "first")
        answer = await by_header.chat.completions.create(model="any", messages=HI, temperature=0)
        whole = whole_of(harness, ids)
        ids = says_oddly(harness, "second")
        await agent.ask([*HI, said(answer), user("more")])
        assert whole_of(harness, ids)[: len(whole)] == whole
        assert len(await agent.calls()) == 2
        await agent.sessions.close(agent.opened)
        with pytest.raises(openai.APIStatusError) as error:
            await by_header.chat.completions.create(model="any", messages=HI)
        assert error.value.status_code == 410
    stranger = harness.client.with_options(default_headers={"X-Penstock-Session": "no session"})
    with pytest.raises(openai.NotFoundError, match="no such session"):
        await stranger.chat.completions.create(model="any", messages=HI)


@pytest.mark.slow
async def test_a_router_that_is_killed_between_calls_is_missed_by_nobody(harness: Harness, nats_url: str) -> None:
    """Another one goes on from the bus, also with what it never saw."""
    async with router_process(nats_url, harness.run, MODEL_PATH, "--bus.lease_ttl_s=60") as dying:
        routers = [dataclasses.replace(harness, routers=[dying]), harness]
        async with agent_session(routers[0]) as agent, agent.at(harness) as elsewhere:
            ids = says_oddly(harness, "before")
            messages = [*HI, said(await agent.ask()), user("more")]
            whole = whole_of(harness, ids)
            dying.process.kill()
            await promptly(dying.process.wait())
            once = agent.clients[0].with_options(max_retries=0)  # another process may get its port
            with pytest.raises(openai.APIConnectionError):
                await once.chat.completions.create(model="any", messages=messages)
            ids = says_oddly(harness, "after")
            await elsewhere.ask(messages)
            assert whole_of(harness, ids)[: len(whole)] == whole
            assert len(await agent.calls()) == 2


async def test_how_tokens_are_drawn_is_the_sessions(harness: Harness) -> None:
    """What the agent sends instead is named in a header; it may ask for fewer tokens, not for more."""
    async with agent_session(harness) as agent:
        raw = await agent.clients[0].chat.completions.with_raw_response.create(
            model="gpt-4o", messages=HI, temperature=0, top_p=0.9, max_tokens=5000
        )
        await agent.ask(max_completion_tokens=3)
        assert sorted(raw.headers["x-penstock-ignored"].split(", ")) == ["temperature", "top_p"]
        assert sorted(request.sampling.max_new_tokens for request in harness.requests) == [3, 2000]
        for request in harness.requests:
            sampling = request.sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.75, 0.5, 7)
            assert (request.min_policy_version, request.exact_policy_version) == (3, 0)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_tools_and_their_answers_continue_what_the_policy_wrote(harness: Harness, is_streamed: bool) -> None:
    """A call comes back as other JSON text than the policy wrote: its own ids stand in the prompt all the same."""
    async with agent_session(harness, tools=(TOOL,)) as agent:
        ids = says_oddly(harness, f"I add.\n{CALL}")
        answer = await agent.ask(stream=is_streamed)
        if is_streamed:
            chunks = await collect(answer)
            [call] = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or []]
            assert chunks[-1].choices[0].finish_reason == "tool_calls"
            text = text_of(chunks)
        else:
            [call] = answer.choices[0].message.tool_calls
            text = answer.choices[0].message.content
        whole = whole_of(harness, ids)
        arguments = json.dumps(dict(reversed(json.loads(call.function.arguments).items())))
        function = {"name": call.function.name, "arguments": arguments}
        assistant = {
            "role": "assistant",
            "content": [{"type": "text", "text": f"{text}\n"}],
            "tool_calls": [{"id": "another", "type": "function", "function": function}],
        }
        ids = harness.says("done")
        reply = {"role": "tool", "tool_call_id": "another", "content": "2"}
        await agent.ask([*HI, assistant, reply], router=1)
        assert whole_of(harness, ids)[: len(whole)] == whole
        assert "add" in harness.renderer.decode(whole)
        assert len(linearize(await agent.sessions.read(agent.opened.id))) == 1


async def test_tools_of_a_row_may_hold_more_than_calls_do(harness: Harness) -> None:
    """As transformers writes them, with what a function returns and without a type; the policy sees the rest."""
    row = {"function": {**TOOL["function"], "return": {"type": "number"}, "examples": []}, "source": "a library"}
    async with agent_session(harness, tools=(row,)) as agent:
        await agent.ask()
        await harness.chat(tools=[{"function": {**TOOL["function"], "return": {"type": "number"}}}])
        for request in harness.requests:
            prompt = harness.renderer._tokenizer.decode(request.input_ids)
            assert json.dumps(TOOL) in prompt
            assert "number" not in prompt
    async with agent_session(harness, tools=(TOOL, {"function": {"description": "adds"}})) as agent:
        with pytest.raises(openai.BadRequestError, match=r"tools of the row: 1\.function\.name is missing; correct"):
            await agent.ask()


async def test_images_of_later_turns_are_stored_once_and_named_by_their_hash(harness: Harness) -> None:
    """The engine fetches them; records hold hashes, each where its call brought the image."""
    other = PNG + b"other"
    seen = {"type": "image_url", "image_url": {"url": data_url(PNG)}}
    async with agent_session(harness) as agent:
        first = {"role": "user", "content": [seen, {"type": "text", "text": "look"}]}
        messages: list[Any] = [first, said(await agent.ask([first]))]
        messages += [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(other)}}]}]
        messages += [said(await agent.ask(messages, router=1)), user("and?")]
        await agent.ask(messages)
        scope = agent.opened.state.scope
        assert [list(call.images) for call in await agent.calls()] == [[hash_of(PNG)], [hash_of(other)], []]
        last = max(harness.requests, key=lambda request: len(request.input_ids))
        assert [(image.stored.sha256, image.stored.scope) for image in last.images] == [
            (hash_of(PNG), scope),
            (hash_of(other), scope),
        ]
        images = ImageStore(harness.bus)
        assert [await images.get(scope, hash_of(image)) for image in (PNG, other)] == [PNG, other]
        [sequence] = linearize(await agent.sessions.read(agent.opened.id))
        assert sequence.images == (hash_of(PNG), hash_of(other))
        same_text = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(other)}},
                                                  {"type": "text", "text": "look"}]}, *messages[1:]]  # fmt: skip
        await agent.ask(same_text)
        assert len(linearize(await agent.sessions.read(agent.opened.id))) == 2


async def test_a_rewritten_history_forks_and_keeps_what_the_policy_said(harness: Harness) -> None:
    """The agent drops its first question: another sequence, in which the policy's answer stands by its own ids."""
    async with agent_session(harness) as agent:
        first_ids = says_oddly(harness, "first answer")
        messages = [*HI, said(await agent.ask())]
        ids = harness.says("second")
        await agent.ask([{"role": "system", "content": "Summary: you said this."}, user("x"), messages[1], user("on")])
        assert count_of(first_ids, whole_of(harness, ids)) == 1
        first, second = linearize(await agent.sessions.read(agent.opened.id))
        assert first.token_ids[first.loss_mask].tolist() == first_ids
        assert second.token_ids[second.loss_mask].tolist() == ids


async def test_a_forced_call_keeps_its_beginning_in_a_rewritten_history(harness: Harness) -> None:
    """The router began it in the prompt and the policy sampled the rest: together they are what the policy said, and
    the rest alone is trained."""
    begun = harness.renderer.render_text('<tool_call>\n{"name": "add", "arguments":')
    async with agent_session(harness, tools=(TOOL,)) as agent:
        rest = says_oddly(harness, ' {"a": 1}}\n</tool_call>')
        first = said(await agent.ask(tool_choice="required"))
        ids = harness.says("done")
        reply = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "2"}
        await agent.ask([{"role": "system", "content": "Be brief."}, *HI, first, reply])
        assert [call.num_begun for call in await agent.calls()] == [len(begun), 0]
        assert count_of([*begun, *rest], whole_of(harness, ids)) == 1
        forced, free = linearize(await agent.sessions.read(agent.opened.id))
        assert forced.token_ids[forced.loss_mask].tolist() == rest
        assert free.token_ids[free.loss_mask].tolist() == ids


async def test_parallel_calls_and_several_choices_are_forks(harness: Harness) -> None:
    """All of them are recorded, whichever router answered; each goes on by itself."""
    async with agent_session(harness) as agent:
        begun = [*HI, said(await agent.ask()), user("more")]
        for engine in harness.engines:
            engine.answer = counting
        asked = [agent.ask([*begun[:-1], user(f"way {way}")], router=way % 2, max_tokens=3 + way) for way in range(4)]
        await asyncio.gather(*asked, agent.ask(begun, n=2, max_tokens=9))
        calls = await agent.sessions.read(agent.opened.id)
        first = calls[0][0]
        assert [call.continues for _, call in calls] == [0, *[first] * 6]
        sequences = linearize(calls)
        assert len(sequences) == 6
        assert sum(sequence.num_own_tokens for sequence in sequences) == sum(len(call.output_ids) for _, call in calls)


async def test_a_call_whose_client_left_was_never_made(harness: Harness) -> None:
    """Nothing of it is recorded, and the session goes on."""
    async with agent_session(harness) as agent:
        harness.says("word " * 200)
        for engine in harness.engines:
            engine.token_s = 0.05
        stream = await agent.ask(stream=True)
        await anext(stream)
        await stream.close()
        await until(lambda: sum(engine.num_running for engine in harness.engines) == 0)
        assert await agent.calls() == []
        for engine in harness.engines:
            engine.token_s = 0.0
        harness.says("fine")
        await agent.ask()
        assert len(await agent.calls()) == 1


async def test_whoever_sees_the_end_of_a_stream_finds_the_call(harness: Harness) -> None:
    """It is recorded before the end is sent."""
    async with agent_session(harness) as agent:
        ids = harness.says("streamed")
        stream = await agent.ask(stream=True)
        async for chunk in stream:
            if chunk.choices[0].finish_reason:
                [call] = await agent.calls()
                assert call.output_ids.tolist() == ids


@pytest.mark.parametrize(("is_superseded", "status", "code"),
                         [(False, 410, "session_closed"), (True, 409, "session_superseded")])  # fmt: skip
async def test_a_session_that_is_over_takes_no_more_calls(
    harness: Harness, is_superseded: bool, status: int, code: str
) -> None:
    """Nor the answer that was under way; clients are told not to try again."""
    group = group_id(harness.run)
    async with agent_session(harness, group) as agent:
        await agent.ask()
        for engine in harness.engines:
            engine.hang_after = 0
        under_way = asyncio.create_task(agent.ask())
        await until(lambda: len(harness.requests) == 2)
        if is_superseded:
            await agent.sessions.open(other := SessionId.new(group, 0), state_of(group, other))
        else:
            await agent.sessions.close(agent.opened)
        for engine in harness.engines:
            engine.released.set()
        num_before = len(harness.requests)
        for call in (under_way, agent.ask(), agent.ask(router=1), agent.ask(router=1, stream=True)):
            with pytest.raises(openai.APIStatusError, match="session") as caught:
                await call
            assert (caught.value.status_code, caught.value.code) == (status, code)
        assert len(harness.requests) == num_before
        assert len(await agent.calls()) == (0 if is_superseded else 1)


async def test_a_session_that_never_was_is_not_found(harness: Harness) -> None:
    """Nor is one with a guessed nonce, before its sample has one."""
    for name in ("nonsense", f"0-0-never-0.{'0' * 32}"):
        client = openai.AsyncOpenAI(base_url=f"{harness.routers[0].url}/sessions/{name}/v1", api_key="none")
        async with client:
            with pytest.raises(openai.NotFoundError, match="there is no such session"):
                await client.chat.completions.create(model="x", messages=HI)


@pytest.mark.parametrize("temperature", [0.75, 0.0])
async def test_a_form_of_the_answer_is_refused(harness: Harness, temperature: float) -> None:
    """Also in a greedy evaluation, where nothing is trained; any text is no form."""
    text = {"response_format": {"type": "text"}}
    async with agent_session(harness, sampling=Sampling(temperature=temperature, max_new_tokens=2000)) as agent:
        for options, name in (
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({**text, "extra_body": {"structured_outputs": {"regex": "a+"}}}, "structured_outputs"),
        ):
            with pytest.raises(openai.BadRequestError, match=f"{name} is not supported in a session") as error:
                await agent.ask(**options)
            assert error.value.param == name
        await agent.ask(**text)
    assert len(harness.requests) == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [('{"model": "any"}', "messages is missing"), ('{"temperature": "hot"', "the body is not JSON")],
)
@pytest.mark.parametrize("is_named_by", ["path", "header"])
async def test_a_body_that_no_call_can_have_is_noted_in_its_session(
    harness: Harness, is_named_by: str, body: str, reason: str
) -> None:
    """As the refusals of calls are: until a call of the session is taken. Where there is no session, nothing is."""
    async with agent_session(harness) as agent, harness.http() as client:
        for name in (str(agent.opened.id), "no session"):
            headers = {"content-type": "application/json"}
            path = "/v1/chat/completions"
            if is_named_by == "header":
                headers["x-penstock-session"] = name
            else:
                path = f"/sessions/{name}{path}"
            answer = await client.post(path, content=body, headers=headers)
            assert answer.status_code == 400
            assert reason in answer.json()["error"]["message"]
        failure = await agent.sessions.read_failure(agent.opened.id)
        assert failure is not None
        assert not failure.is_poison
        assert failure.reason == answer.json()["error"]["message"]
        await agent.ask()
        assert await agent.sessions.read_failure(agent.opened.id) is None


async def test_raw_completions_have_no_sessions(harness: Harness) -> None:
    """They would be answered outside of the sample."""
    async with agent_session(harness) as agent:
        by_header = harness.client.with_options(default_headers={"x-penstock-session": str(agent.opened.id)})
        with pytest.raises(openai.BadRequestError, match="no sessions; ask /v1/chat/completions") as error:
            await by_header.completions.create(model=harness.run, prompt="hi")
        assert error.value.param == "x-penstock-session"
    assert harness.requests == []


async def test_limits_end_a_session_in_words(harness: Harness) -> None:
    """Of answers, and of tokens: an answer gets what is left of them."""
    async with agent_session(harness, limits=Limits(max_turns=1)) as agent:
        await agent.ask()
        with pytest.raises(openai.BadRequestError, match="max_turns = 1; end the agent's loop earlier") as caught:
            await agent.ask()
        assert caught.value.code == "session_limit_reached"
    async with agent_session(harness, limits=Limits(max_tokens=40)) as agent:
        for engine in harness.engines:
            engine.answer = counting
        answer = await agent.ask()
        [call] = await agent.calls()
        assert len(call.input_ids) + len(call.output_ids) == 40
        with pytest.raises(openai.BadRequestError, match="session's max_tokens is 40; shorten it"):
            await agent.ask([*HI, said(answer), user("more")])
    async with agent_session(harness, limits=Limits(max_tokens=1500), tools=(TOOL,)) as agent:
        await agent.ask(tool_choice="required")
        [call] = await agent.calls()
        assert len(call.input_ids) + len(call.output_ids) == 1500


async def test_images_count_in_a_sessions_limits(harness: Harness) -> None:
    """By the tokens that the engine will make of them, and by their pixels."""
    picture = read_picture(Image.new("RGB", (96, 96)), "a picture")
    seen = {"type": "image_url", "image_url": {"url": data_url(picture)}}
    messages = [{"role": "user", "content": [seen, seen, {"type": "text", "text": "look"}]}]
    async with agent_session(harness) as agent:
        await agent.ask(messages)
    num_tokens = len(harness.requests[0].input_ids) + 2 * (9 - 1)
    async with agent_session(harness, limits=Limits(max_tokens=num_tokens + 1, max_images=2)) as agent:
        await agent.ask(messages)
    assert sorted(request.sampling.max_new_tokens for request in harness.requests) == [1, 2000]
    for limits, words in (
        ({"max_tokens": num_tokens}, f"has {num_tokens} tokens, and the session's max_tokens is {num_tokens}; shorten"),
        ({"max_images": 1}, "has 2 images, and the session's max_images is 1; shorten it"),
        ({"max_pixels": 96 * 96}, "has 18432 pixels, and the session's max_pixels is 9216; shorten it"),
    ):
        async with agent_session(harness, limits=Limits(**limits)) as agent:
            with pytest.raises(openai.BadRequestError, match=words) as caught:
                await agent.ask(messages)
            assert caught.value.code == "session_limit_reached"
    assert len(harness.requests) == 2


async def test_a_session_lists_the_policy_while_it_is_open(harness: Harness) -> None:
    """Some clients ask before they begin."""
    async with agent_session(harness) as agent:
        assert [model.id async for model in agent.clients[1].models.list()] == [harness.run]
        await agent.sessions.close(agent.opened)
        with pytest.raises(openai.APIStatusError, match="session is closed"):
            await agent.clients[1].models.list()
