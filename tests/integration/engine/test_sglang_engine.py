"""What SglangEngine makes of what SGLang does, with a stand-in for it; tokens are for real SGLang."""

import asyncio
import importlib
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fastapi
import pytest

from penstock.errors import InvalidRequestError, UnavailableError
from services.rollout.engine.config import RolloutConfig
from services.rollout.engine.prompt import CheckedRequest
from services.rollout.engine.sglang.engine import SglangEngine
from services.rollout.engine.sglang.recipe_settings import known_names
from tests.support.waiting import HANG_S

REQUEST = CheckedRequest(
    input_ids=[1], images=[], temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=4, stop_token_ids=[]
)


@pytest.fixture(autouse=True, scope="module")
def sglang() -> None:
    """Imported without its warnings of what a machine without a GPU lacks."""
    with warnings.catch_warnings(action="ignore"):
        importlib.import_module("sglang.srt.managers.io_struct")


class TokenizerManager:
    """Fails every request with `error`, or never answers."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.aborted: list[str] = []

    async def generate_request(self, request: Any, _http: None) -> AsyncIterator[dict[str, Any]]:
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()
        yield {}

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)


def engine_of(manager: TokenizerManager, model_path: Path) -> SglangEngine:
    raw = SimpleNamespace(
        tokenizer_manager=manager,
        server_args=SimpleNamespace(enable_return_routed_experts=False),
        _scheduler_init_result=SimpleNamespace(
            scheduler_infos=[{"max_total_num_tokens": 1000, "max_req_input_len": 500}]
        ),
    )
    return SglangEngine(raw, RolloutConfig(), model_path)


async def played(engine: SglangEngine, *, as_stream: bool) -> None:
    if as_stream:
        async for _ in engine.stream(REQUEST, chunk_tokens=4):
            pass
    else:
        await engine.generate(REQUEST)


@pytest.mark.parametrize("as_stream", [False, True])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (fastapi.HTTPException(503, "the queue is full"), UnavailableError),
        (fastapi.HTTPException(500, "the queue is full"), UnavailableError),
        (ValueError("the queue is full"), InvalidRequestError),
    ],
)
async def test_a_request_that_sglang_ends_is_an_error_of_ours(
    tiny_model_path: Path, error: Exception, kind: type[Exception], as_stream: bool
) -> None:
    """For a fault of its own, others may play it; for a fault of the request, nobody can."""
    engine = engine_of(TokenizerManager(error), tiny_model_path)
    with pytest.raises(kind, match="the queue is full"):
        await played(engine, as_stream=as_stream)
    assert engine.num_in_flight == 0


@pytest.mark.parametrize("as_stream", [False, True])
@pytest.mark.parametrize("num_steps", range(4))
async def test_a_call_is_ended_however_young_it_is(tiny_model_path: Path, num_steps: int, as_stream: bool) -> None:
    """Also one that has not reached SGLang yet: it hears why, and what is left of it is aborted."""
    manager = TokenizerManager()
    engine = engine_of(manager, tiny_model_path)
    playing = asyncio.create_task(played(engine, as_stream=as_stream))
    while not engine.num_in_flight and not playing.done():
        await asyncio.sleep(0)
    for _ in range(num_steps):
        await asyncio.sleep(0)
    engine.fail_running("the engine drains")
    await asyncio.wait({playing}, timeout=5.0)
    assert playing.done()
    with pytest.raises(UnavailableError, match="the engine drains"):
        await playing
    assert len(manager.aborted) == 1
    await engine.idle()


@pytest.mark.parametrize("as_stream", [False, True])
async def test_a_call_hears_what_ended_it_first(tiny_model_path: Path, as_stream: bool) -> None:
    """An engine that died drains at once; its callers may not take its death for a hand-over: deaths are counted."""
    engine = engine_of(TokenizerManager(), tiny_model_path)
    playing = asyncio.create_task(played(engine, as_stream=as_stream))
    while not engine.num_in_flight and not playing.done():
        await asyncio.sleep(0)
    engine.fail_running("the engine died")
    engine.hand_over("the engine drains")
    engine.fail_running("the engine shuts down")
    with pytest.raises(UnavailableError, match="the engine died"):
        await asyncio.wait_for(playing, HANG_S)
    await engine.idle()


def test_names_are_read_as_sglang_has_them() -> None:
    """`known_names` reads SGLang's source; SGLang itself builds the same names from it."""
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.server_args import ServerArgs

    assert known_names() == {field.name for field in record_fields(ServerArgs) if not field.name.startswith("_")}
