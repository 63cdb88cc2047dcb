"""Streams of the rollout engine: the same tokens as a unary call, whatever interrupts them."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
import pytest
import torch

from penstock.clients import GenerateClient
from penstock.clients.resumable import ResumableTurn
from penstock.errors import DeadlineError, InvalidRequestError, NotReadyError, UnavailableError
from penstock.v1 import common_pb2, generate_pb2
from services.rollout.testing.engine_process import EngineProcess
from tests.support.engine.push import Push
from tests.support.engine.reference import (
    TOLERANCE,
    Reference,
    assert_freed,
    long_request,
    picture,
    prompt,
    request,
    require_logprobs,
    until_replica,
)
from tests.support.engine.traffic import Traffic
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.usefixtures("rendezvous")]

PICTURES = {"text": [], "image": [picture(150, 101, seed=1)], "two images": [picture(96, 96), picture(60, 200, seed=2)]}


@pytest.fixture
async def client(engine: EngineProcess) -> AsyncIterator[GenerateClient]:
    """A caller of the engine."""
    async with GenerateClient((await engine.replica()).address) as client:
        yield client


def turn(
    reference: Reference,
    kind: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    chunk_tokens: int = 0,
    seed: int = 0,
) -> generate_pb2.GenerateRequest:
    """A turn with the pictures of `kind`."""
    rng = random.Random(f"{kind} {seed}")
    ids = prompt(rng, num_images=len(PICTURES[kind]), image_id=reference.image_id)
    made = request(ids, PICTURES[kind], max_new_tokens=max_new_tokens, temperature=temperature)
    made.chunk_tokens = chunk_tokens
    return made


async def unbroken_turn(
    client: GenerateClient, reference: Reference, kind: str
) -> tuple[generate_pb2.GenerateRequest, generate_pb2.GenerateResponse]:
    """A greedy turn that does not stop at once, and its unary answer."""
    for seed in range(30):
        made = turn(reference, kind, max_new_tokens=40, seed=seed)
        response = await client.generate(made, timeout_s=60)
        if len(response.output_ids) >= 20:
            return made, response
    raise AssertionError("this policy always stops at once")


async def play(client: GenerateClient, continuation: ResumableTurn, *, leave_after: int = 10**6) -> list[int]:
    """Play one attempt, at most until `leave_after` tokens have come; the sizes of its chunks."""
    sizes: list[int] = []
    async with aclosing(client.stream(continuation.remaining(), timeout_s=120)) as chunks:
        async for chunk in chunks:
            continuation.add(chunk)
            sizes.append(len(chunk.output_ids))
            if sum(sizes) >= leave_after:
                break
    return sizes


def require_same(one: generate_pb2.GenerateResponse, other: generate_pb2.GenerateResponse) -> None:
    """The same but for what a prefix cache changes."""
    assert one.output_ids == other.output_ids
    assert (torch.tensor(one.logprobs) - torch.tensor(other.logprobs)).abs().max() < TOLERANCE
    assert one.version_spans == other.version_spans
    assert one.finish_reason == other.finish_reason
    assert one.usage.num_prompt_tokens == other.usage.num_prompt_tokens
    assert one.usage.num_output_tokens == other.usage.num_output_tokens


@pytest.mark.parametrize("kind", PICTURES)
async def test_a_stream_holds_the_tokens_of_the_unary_answer(
    engine: EngineProcess, client: GenerateClient, current: Reference, kind: str
) -> None:
    """Greedy, token by token and in chunks: ids, logprobs, spans, usage and the reason of the end."""
    version = (await engine.replica()).policy_version
    made, unary = await unbroken_turn(client, current, kind)
    for _ in range(10):  # on a busy machine SGLang may have made all tokens before the engine sends the first
        num_chunks = []
        for chunk_tokens in (0, 7):
            made.chunk_tokens = chunk_tokens
            continuation = ResumableTurn(made)
            num_chunks.append(len(await play(client, continuation)))
            require_same(continuation.response(), unary)
            require_logprobs({version: current}, made, continuation.response())
        if num_chunks[0] > num_chunks[1] > 1:
            return
    raise AssertionError(f"no tokens came before the end: {num_chunks} chunks")


async def test_usage_comes_with_the_first_chunk_and_the_last(client: GenerateClient, current: Reference) -> None:
    """Prompt tokens, images expanded, are known at once; a finish reason comes only with the last token."""
    made, unary = await unbroken_turn(client, current, "image")
    for _ in range(10):  # as above
        chunks = [chunk async for chunk in client.stream(made, timeout_s=60)]
        if len(chunks) > 1:
            break
    assert [chunk.HasField("usage") for chunk in chunks] == [True] + [False] * (len(chunks) - 2) + [True]
    assert chunks[0].usage.num_prompt_tokens == unary.usage.num_prompt_tokens > len(made.input_ids)
    assert chunks[0].usage.num_output_tokens == len(chunks[0].output_ids)
    assert chunks[-1].usage.num_output_tokens == len(unary.output_ids)
    assert {chunk.finish_reason for chunk in chunks[:-1]} == {generate_pb2.FINISH_REASON_UNSPECIFIED}
    assert chunks[-1].finish_reason == unary.finish_reason


@pytest.mark.parametrize("kind", PICTURES)
async def test_a_turn_in_attempts_is_the_unbroken_turn(client: GenerateClient, current: Reference, kind: str) -> None:
    """Left twice and gone on with the tokens so far: the ids of unbroken greedy generation, and its logprobs."""
    made, unbroken = await unbroken_turn(client, current, kind)
    for _ in range(10):  # on a busy machine the engine may have finished before the first chunk is read
        continuation = ResumableTurn(made)
        for _ in range(2):
            if not continuation.is_finished:
                await play(client, continuation, leave_after=5)
        if not continuation.is_finished:
            break
    await play(client, continuation)
    require_same(continuation.response(), unbroken)


@pytest.mark.slow
async def test_a_push_during_a_stream_shows_where_it_came(
    engine: EngineProcess, client: GenerateClient, current: Reference
) -> None:
    """Spans come with the tokens, chunk by chunk, and each token has its version's logprob; text and images."""
    old_version = (await engine.replica()).policy_version
    made = [
        turn(current, kind, max_new_tokens=300, temperature=1.0, chunk_tokens=chunk_tokens)
        for kind in PICTURES
        for chunk_tokens in (0, 5, 64)
    ]
    turns: list[ResumableTurn] = []

    async def play_another(index: int) -> None:
        turns.append(ResumableTurn(made[index % len(made)]))
        await play(client, turns[-1])

    newer = current.perturbed(seed=3)
    push = Push(engine, newer.weights, old_version + 2)
    await push.prepare()
    traffic = Traffic(play_another, 3 * len(made))
    await until(lambda: sum(each.num_tokens > 0 and not each.is_finished for each in turns) >= 12)
    await push.pause()
    traffic.stop()
    await push.deliver()
    await asyncio.gather(*traffic.calls)
    versions = [[span.policy_version for span in each.response().version_spans] for each in turns]
    assert versions.count([old_version, old_version + 2]) >= 4
    for index, each in enumerate(turns):
        require_logprobs({old_version: current, old_version + 2: newer}, made[index % len(made)], each.response())


async def test_a_caller_that_leaves_frees_the_engine(engine: EngineProcess, client: GenerateClient) -> None:
    """After its first tokens, and when its deadline passes."""
    for timeout_s, leave_after in ((60.0, 2), (0.5, 10**6)):

        async def leave(timeout_s: float = timeout_s, leave_after: int = leave_after) -> None:
            num_tokens = 0
            async with aclosing(client.stream(long_request(), timeout_s=timeout_s)) as chunks:
                async for chunk in chunks:
                    num_tokens += len(chunk.output_ids)
                    if num_tokens >= leave_after:
                        return

        results = await asyncio.gather(*(leave() for _ in range(24)), return_exceptions=True)
        if leave_after > 2:
            assert DeadlineError in {type(result) for result in results}
        await assert_freed(engine)


async def test_a_cancelled_caller_aborts_in_the_engine(engine: EngineProcess, client: GenerateClient) -> None:
    """Not only between chunks: one that waits for its first has nothing in hand to notice it by."""
    made = long_request()
    made.chunk_tokens = 900
    plays = [asyncio.create_task(play(client, ResumableTurn(made))) for _ in range(24)]
    await until_replica(engine, lambda replica: replica.num_running >= 12)
    for each in plays:
        each.cancel()
    await asyncio.gather(*plays, return_exceptions=True)
    await assert_freed(engine)


@pytest.mark.slow
async def test_what_a_broken_push_interrupts_goes_on_where_it_was(
    engine: EngineProcess, client: GenerateClient, current: Reference
) -> None:
    """Streams deliver all they have, then UNAVAILABLE; with the tokens so far the next push's policy plays the rest."""
    version = (await engine.replica()).policy_version
    made = turn(current, "image", max_new_tokens=400, temperature=1.0, chunk_tokens=400)
    turns: list[ResumableTurn] = []

    async def play_another(_: int) -> None:
        turns.append(ResumableTurn(made))
        await play(client, turns[-1])

    push = Push(engine, current.perturbed(6).weights, version + 1, bucket_bytes=200_000)
    await push.prepare()
    traffic = Traffic(play_another, 12)
    await traffic.under_way()
    await push.pause()
    traffic.stop()
    with pytest.raises(grpc.aio.AioRpcError):
        await push.break_off()
    results = await asyncio.gather(*traffic.calls, return_exceptions=True)
    interrupted = [each for each, result in zip(turns, results, strict=True) if isinstance(result, Exception)]
    errors = [result for result in results if isinstance(result, Exception)]
    # Those that traffic began in the moment of the pause may still have waited for their picture to be decoded.
    refused = [error for error in errors if isinstance(error, NotReadyError)]
    assert all("this engine is REPLICA_STATE_BROKEN" in str(error) for error in refused)
    assert {type(error) for error in errors if error not in refused} == {UnavailableError}
    assert not any(each.is_finished for each in interrupted)
    newer = current.perturbed(7)
    await Push(engine, newer.weights, version + 1).complete()
    assert (await engine.replica()).state == common_pb2.REPLICA_STATE_READY
    await asyncio.gather(*(play(client, each) for each in interrupted))
    begun_before = [each for each in interrupted if each.response().version_spans[0].policy_version == version]
    assert begun_before
    for each in interrupted:
        spans = [span.policy_version for span in each.response().version_spans]
        assert spans == ([version, version + 1] if each in begun_before else [version + 1])
        require_logprobs({version: current, version + 1: newer}, made, each.response())


async def test_a_bad_stream_is_refused_as_a_call_is(client: GenerateClient) -> None:
    """Before its first chunk, with what is wrong."""
    wrong = request([1, 2])
    wrong.chunk_tokens = -1
    for bad, message in ((wrong, "chunk_tokens = -1 must be 0"), (request([1, 10**6]), r"input_ids\[1\] = 1000000")):
        with pytest.raises(InvalidRequestError, match=message):
            [_ async for _ in client.stream(bad, timeout_s=10)]
