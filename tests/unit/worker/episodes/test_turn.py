"""Turns as streams: tokens that came are kept, whatever ends the turn; waiting does not count against it."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import (
    AccessError,
    DeadlineError,
    MissingImageError,
    OverloadedError,
    PenstockError,
    PoisonError,
    PromptTooLongError,
    UnavailableError,
)
from penstock.v1 import common_pb2, generate_pb2
from services.rollout.worker.episodes import turn as turn_module
from services.rollout.worker.episodes.turn import Turn, TurnPlayer

REQUEST = generate_pb2.GenerateRequest(
    request_id="r", input_ids=[1, 2], sampling=generate_pb2.SamplingParams(max_new_tokens=8)
)
HANG = "hang"


def chunk(*ids: int, last: bool = False) -> generate_pb2.GenerateChunk:
    """A chunk of version 4."""
    return generate_pb2.GenerateChunk(
        output_ids=ids,
        logprobs=[-0.5] * len(ids),
        version_spans=[common_pb2.VersionSpan(num_tokens=len(ids), policy_version=4)],
        finish_reason=generate_pb2.FINISH_REASON_STOP if last else generate_pb2.FINISH_REASON_UNSPECIFIED,
        usage=generate_pb2.Usage(num_prompt_tokens=2),
        replica_id="engine-a",
    )


@dataclasses.dataclass
class ScriptedStreams:
    """Streams `script`, one attempt after another: chunks, an error to raise, or HANG; an event is waited for, and a
    function called."""

    script: Sequence[Sequence[generate_pb2.GenerateChunk | PenstockError | asyncio.Event | Callable[[], None] | str]]
    requests: list[generate_pb2.GenerateRequest] = dataclasses.field(default_factory=list)
    num_cancelled: int = 0
    num_restored: int = 0
    restored: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set a moment after images were stored again."""

    async def stream(
        self, request: generate_pb2.GenerateRequest, *, timeout_s: float
    ) -> AsyncGenerator[generate_pb2.GenerateChunk, None]:
        self.requests.append(request)
        for each in self.script[len(self.requests) - 1]:
            match each:
                case PenstockError():
                    raise each
                case asyncio.Event():
                    await each.wait()
                case generate_pb2.GenerateChunk():
                    yield each
                case _ if callable(each):
                    each()
                case _:
                    try:
                        await asyncio.Event().wait()
                    finally:
                        self.num_cancelled += 1


async def play(streams: ScriptedStreams, *, budget_s: float = 60.0, wait_timeout_s: float = 60.0) -> Turn:
    """One turn."""

    async def restore_images(_: float) -> None:
        streams.num_restored += 1
        asyncio.get_running_loop().call_soon(streams.restored.set)

    player = TurnPlayer(streams, wait_timeout_s=wait_timeout_s)
    return await player.play(REQUEST, budget_s=budget_s, restore_images=restore_images)


async def test_a_turn_is_the_chunks_of_its_stream() -> None:
    """Ids, spans and finish reason are those of an unbroken answer."""
    turn = await play(ScriptedStreams([[chunk(10, 11), chunk(12, last=True)]]))
    assert list(turn.response.output_ids) == [10, 11, 12]
    assert turn.response.finish_reason == generate_pb2.FINISH_REASON_STOP
    assert (turn.response.replica_id, turn.failure) == ("engine-a", "")


async def test_at_its_deadline_a_turn_keeps_the_tokens_that_came() -> None:
    """The stream is closed, so the engine stops generating, and the reason is DEADLINE, not LENGTH."""
    streams = ScriptedStreams([[chunk(10, 11), HANG]])
    turn = await play(streams, budget_s=0.05)
    assert list(turn.response.output_ids) == [10, 11]
    assert turn.response.finish_reason == generate_pb2.FINISH_REASON_DEADLINE
    assert streams.num_cancelled == 1


async def test_waiting_for_the_first_token_is_not_on_the_turns_clock() -> None:
    """The budget is over long before the first chunk; the turn is whole all the same."""
    begun = asyncio.Event()
    asyncio.get_running_loop().call_later(0.3, begun.set)
    turn = await play(ScriptedStreams([[begun, chunk(10), chunk(11, last=True)]]), budget_s=0.1)
    assert list(turn.response.output_ids) == [10, 11]
    assert turn.response.finish_reason == generate_pb2.FINISH_REASON_STOP
    assert turn.waited_s > turn.generated_s


async def test_a_turn_of_many_chunks_has_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has a thousand turns whose chunks come each second."""
    delays: list[float | None] = []
    timeout = asyncio.timeout

    def counted(delay: float | None) -> asyncio.Timeout:
        delays.append(delay)
        return timeout(delay)

    monkeypatch.setattr(asyncio, "timeout", counted)
    await play(ScriptedStreams([[chunk(10), chunk(11), chunk(12), chunk(13, last=True)]]))
    assert len(delays) == 1


async def test_a_turn_without_a_token_gives_up_after_the_wait_timeout() -> None:
    """Nothing of the policy's is lost by it; the error names the setting."""
    with pytest.raises(DeadlineError, match=r"no token came within 0\.05 s"):
        await play(ScriptedStreams([[HANG]]), wait_timeout_s=0.05)


async def test_a_broken_stream_goes_on_from_the_tokens_delivered() -> None:
    """The next attempt's prompt ends with them; they are not sampled again."""
    streams = ScriptedStreams([[chunk(10, 11), UnavailableError("router gone")], [chunk(12, last=True)]])
    turn = await play(streams)
    assert list(turn.response.output_ids) == [10, 11, 12]
    assert list(streams.requests[1].input_ids) == [1, 2, 10, 11]
    assert streams.requests[1].sampling.max_new_tokens == 6


async def test_what_may_pass_is_tried_again_until_the_wait_timeout() -> None:
    """A full queue is waited out; a router that stays away is the turn's error."""
    turn = await play(ScriptedStreams([[OverloadedError("full")], [chunk(10, last=True)]]))
    assert list(turn.response.output_ids) == [10]
    with pytest.raises(UnavailableError, match="away"):
        await play(ScriptedStreams([[UnavailableError("away")]] * 100), wait_timeout_s=0.01)
    with pytest.raises(DeadlineError, match=r"no token came within 1 s.*refused: away"):
        await play(ScriptedStreams([[UnavailableError("away")], [HANG]]), wait_timeout_s=1.0)


async def test_a_turn_that_breaks_replicas_is_never_tried_again() -> None:
    """With tokens it ends with them and says why; without any it fails."""
    streams = ScriptedStreams([[PoisonError("given up after 3 replicas failed")]])
    with pytest.raises(PoisonError, match="3 replicas"):
        await play(streams)
    assert len(streams.requests) == 1
    turn = await play(ScriptedStreams([[chunk(10), PoisonError("given up after 3 replicas failed")]]))
    assert list(turn.response.output_ids) == [10]
    assert "3 replicas" in turn.failure


async def test_a_turn_that_crashes_in_replicas_that_live_on_keeps_its_tokens() -> None:
    """It ends with them and says why; without any it fails, and so it does where a person must change something."""
    crash = PenstockError("router: RuntimeError: out of memory")
    turn = await play(ScriptedStreams([[chunk(10, 11), crash]]))
    assert (list(turn.response.output_ids), turn.failure) == ([10, 11], "router: RuntimeError: out of memory")
    with pytest.raises(PenstockError, match="out of memory"):
        await play(ScriptedStreams([[crash]]))
    with pytest.raises(AccessError, match="token"):
        await play(ScriptedStreams([[chunk(10), AccessError("router: the token is wrong")]]))


async def test_a_turn_that_loses_an_image_keeps_the_tokens_delivered() -> None:
    """Its replica died, and the next one finds no image: once it is stored again, the turn goes on from its tokens."""
    dead, lost = UnavailableError("replica gone"), MissingImageError("image 0a is not stored")
    streams = ScriptedStreams([[chunk(10, 11), dead], [lost], [chunk(12), dead], [lost], [chunk(13, last=True)]])
    turn = await play(streams)
    assert (list(turn.response.output_ids), turn.failure) == ([10, 11, 12, 13], "")
    assert [list(request.input_ids)[2:] for request in streams.requests] == [[], *[[10, 11]] * 2, *[[10, 11, 12]] * 2]
    assert streams.num_restored == 2


async def test_a_long_turn_that_loses_an_image_may_wait_for_a_replica_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As long as one that has just begun, though it has played for longer than that already."""
    clock: Any = SimpleNamespace(at=0.0, monotonic=lambda: clock.at)
    monkeypatch.setattr(turn_module, "time", clock)

    def play_long() -> None:
        clock.at += 120.0

    is_free = asyncio.Event()
    attempts = [[chunk(10), play_long, MissingImageError("image x")], [is_free, chunk(11, last=True)]]
    turn = await play(ScriptedStreams(attempts, restored=is_free), budget_s=3600.0, wait_timeout_s=60.0)
    assert (list(turn.response.output_ids), turn.response.finish_reason) == ([10, 11], generate_pb2.FINISH_REASON_STOP)


async def test_an_image_that_storing_again_does_not_bring_back_ends_the_turn() -> None:
    """With tokens it ends with them and says why; without any it fails."""
    lost = MissingImageError("image 0a is not stored")
    streams = ScriptedStreams([[chunk(10), UnavailableError("replica gone")], [lost], [lost]])
    turn = await play(streams)
    assert (list(turn.response.output_ids), turn.failure) == ([10], "image 0a is not stored")
    assert streams.num_restored == 1
    with pytest.raises(MissingImageError, match="0a"):
        await play(ScriptedStreams([[lost], [lost]]))


async def test_a_turn_that_no_other_replica_has_room_for_ends_as_length() -> None:
    """Its first replica died, and the others hold less."""
    turn = await play(ScriptedStreams([[chunk(10), PromptTooLongError("too long")]]))
    assert (list(turn.response.output_ids), turn.response.finish_reason) == ([10], generate_pb2.FINISH_REASON_LENGTH)


async def test_an_error_after_the_last_chunk_is_of_no_account() -> None:
    """All tokens are here."""
    turn = await play(ScriptedStreams([[chunk(10, last=True), UnavailableError("closing")]]))
    assert (list(turn.response.output_ids), turn.failure) == ([10], "")
