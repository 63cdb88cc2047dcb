"""What calls may ask of real SGLang beside tokens: likeliest ids, the prompt's logprobs, a form of the output."""

import asyncio
import copy
import json
import random
from collections.abc import AsyncIterator

import pytest
import torch

from penstock.clients import GenerateClient
from penstock.errors import InvalidRequestError
from penstock.model.chat.chat_template import Renderer
from penstock.v1 import generate_pb2
from services.rollout.testing.engine_process import EngineProcess
from tests.support.engine.push import Push
from tests.support.engine.reference import TOLERANCE, Reference, prompt, request, until_replica
from tests.support.router.openai_harness import MODEL_PATH

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.usefixtures("rendezvous")]


@pytest.fixture
async def client(engine: EngineProcess) -> AsyncIterator[GenerateClient]:
    """A caller of the engine."""
    async with GenerateClient((await engine.replica()).address) as client:
        yield client


def text_request(current: Reference, **options: int) -> generate_pb2.GenerateRequest:
    """A turn without images."""
    return request(prompt(random.Random(0), num_images=0, image_id=current.image_id), **options)


async def test_likeliest_ids_stand_beside_the_sampled_one(client: GenerateClient, current: Reference) -> None:
    """In order; the sampled id, where it is among them, has the same logprob there."""
    made = text_request(current, max_new_tokens=8)
    made.num_top_logprobs = 5
    response = await client.generate(made, timeout_s=60)
    assert len(response.top_logprobs) == len(response.output_ids)
    for token, logprob, place in zip(response.output_ids, response.logprobs, response.top_logprobs, strict=True):
        assert list(place.logprobs) == sorted(place.logprobs, reverse=True)
        assert len(place.ids) == len(place.logprobs) == 5
        if token in place.ids:
            assert place.logprobs[list(place.ids).index(token)] == pytest.approx(logprob, abs=TOLERANCE)


async def test_the_prompt_is_scored_by_the_same_model(client: GenerateClient, current: Reference) -> None:
    """Untempered, each token but the first, also when its prefix is cached; over the whole vocabulary, because a prompt
    may hold ids that are never sampled."""
    made = text_request(current, max_new_tokens=1)
    made.sampling.temperature = 0.5
    await client.generate(made, timeout_s=60)
    made.prompt_logprobs = True
    response = await client.generate(made, timeout_s=60)
    ids = list(made.input_ids)
    unmasked = copy.copy(current)
    unmasked.forbidden = []
    expected, _ = unmasked.logprobs(ids[:1], [], ids[1:], temperature=1.0)
    assert (torch.tensor(list(response.prompt_logprobs.logprobs)) - expected).abs().max() < TOLERANCE


async def test_a_turn_that_is_not_asked_to_score_does_not(client: GenerateClient, current: Reference) -> None:
    """Neither field is set."""
    response = await client.generate(text_request(current, max_new_tokens=3), timeout_s=60)
    assert not response.HasField("prompt_logprobs")
    assert not response.top_logprobs


async def test_nothing_ends_a_turn_that_ignores_ends(client: GenerateClient, current: Reference) -> None:
    """It has all the tokens it may have."""
    made = text_request(current, max_new_tokens=200)
    made.sampling.ignore_end = True
    response = await client.generate(made, timeout_s=120)
    assert len(response.output_ids) == 200
    assert response.finish_reason == generate_pb2.FINISH_REASON_LENGTH


async def test_a_schema_is_kept(client: GenerateClient, current: Reference) -> None:
    """Even by a policy that knows no JSON; the end token is part of the output."""
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "side": {"enum": ["left", "right"]}},
        "required": ["ok", "side"],
        "additionalProperties": False,
    }
    made = text_request(current, max_new_tokens=800)  # there may be any amount of space between the words
    made.sampling.constraint.json_schema = json.dumps(schema)
    response = await client.generate(made, timeout_s=120)
    value = json.loads(Renderer.load(MODEL_PATH).decode(response.output_ids))
    assert type(value["ok"]) is bool
    assert value["side"] in ("left", "right")


async def test_a_pattern_is_kept(client: GenerateClient, current: Reference) -> None:
    """The whole output matches it."""
    made = text_request(current, max_new_tokens=20)
    made.sampling.constraint.regex = "(yes|no)"
    response = await client.generate(made, timeout_s=120)
    assert Renderer.load(MODEL_PATH).decode(response.output_ids) in ("yes", "no")


async def test_weights_change_while_a_grammar_is_compiled(
    engine: EngineProcess, client: GenerateClient, current: Reference
) -> None:
    """The push waits for the grammar at most, and the request gets the new weights."""
    for num_properties in (1000, 2000, 4000):  # each may be left out: a thousand take a second to compile
        version = (await engine.replica()).policy_version + 1
        push = Push(engine, current.weights, version)
        await push.prepare()
        made = text_request(current, max_new_tokens=8)
        properties = {f"part {number}": {"type": "boolean"} for number in range(num_properties)}
        made.sampling.constraint.json_schema = json.dumps({"type": "object", "properties": properties})
        answering = asyncio.ensure_future(client.generate(made, timeout_s=120))
        await until_replica(
            engine,
            lambda replica: answering.done() or replica.num_running + replica.num_queued > 0,  # noqa: B023 - awaited
        )
        await push.finish()
        response = await answering
        assert Renderer.load(MODEL_PATH).decode(response.output_ids).startswith("{")
        if [span.policy_version for span in response.version_spans] == [version]:
            return
        # The grammar was compiled before the pause, as on a machine that does not run this test for a while.
    raise AssertionError("each grammar was compiled before the push")


async def test_a_grammar_that_is_none_is_refused(client: GenerateClient, current: Reference) -> None:
    """By SGLang's compiler; the engine goes on."""
    made = text_request(current, max_new_tokens=4)
    made.sampling.constraint.ebnf = "root ::= ("
    with pytest.raises(InvalidRequestError, match="SGLang refuses the request"):
        await client.generate(made, timeout_s=120)
    assert (await client.generate(text_request(current, max_new_tokens=2), timeout_s=60)).output_ids
