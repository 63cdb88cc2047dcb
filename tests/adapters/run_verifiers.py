"""Environments of the real verifiers, in a process of its own venv, play whole groups through the router's sessions.

Not collected by default: `make test-adapters`.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.bus.connection import Bus
from penstock.model.chat.chat_template import Renderer
from penstock.runtime.ports import free_ports
from penstock.testing.simulated_engine import SimulatedEngine
from tests.support.waiting import until
from tests.support.worker.agent_harness import LONG, TEXT, Speaker
from tests.support.worker.prompts import make_prompt, publish, until_done, working

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("PENSTOCK_TEST_CLIENTS", ".clients")).resolve() / "verifiers/bin/python"


START_S = 240.0
"""How long the service's imports, or uv's installation of a harness at the first episode, may take."""


@pytest.fixture
async def engine(bus: Bus, renderer: Renderer) -> AsyncIterator[SimulatedEngine]:
    """An engine that knows the answers to both tasksets."""
    answers = [("sure", "Yes, 8."), ("triangle", "8"), ("now", "blue"), ("colour", "red")]
    async with SimulatedEngine(bus, answer=Speaker(renderer, answers), policy_version=4).running() as engine:
        yield engine


@contextlib.asynccontextmanager
async def serving(taskset: str, folder: Path) -> AsyncIterator[str]:
    """The example's service with this taskset, which writes what it must into `folder`; yields its address."""
    if not PYTHON.exists():
        pytest.skip(f"verifiers is not installed: there is no {PYTHON}; make test-adapters fetches it")
    port = free_ports(1)[0]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "tests/adapters/tasksets"),
        "TMPDIR": str(folder),
        "PATH": f"{ROOT / '.uv/bin'}:{os.environ['PATH']}",
    }
    process = await asyncio.create_subprocess_exec(
        *(str(PYTHON), str(ROOT / "examples/verifiers/verifiers_agent.py"), "serve", taskset, "--port", str(port)),
        env=environment,
    )

    async def is_up() -> bool:
        assert process.returncode is None, "the service has ended"
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient() as client:
                return (await client.get(f"http://127.0.0.1:{port}/")).status_code == 404
        return False

    try:
        await until(is_up, timeout_s=START_S)
        yield f"http://127.0.0.1:{port}/play"
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("taskset", "said", "reward", "metrics", "num_images"),
    [
        ("count_letters", ["8", "Yes, 8."], 1.0, {"replies": 2.0}, 0),
        ("name_color", ["red", "blue"], 0.5, {}, 2),
    ],
)
async def test_a_taskset_of_verifiers_plays_a_group(
    bus: Bus,
    engine: SimulatedEngine,
    make_harness: Callable[..., Any],
    run_name: str,
    tmp_path: Path,
    taskset: str,
    said: list[str],
    reward: float,
    metrics: dict[str, float],
    num_images: int,
) -> None:
    """Its two turns are one sequence of exactly the engine's ids, pictures of both turns included; its Episode gives
    reward and metrics."""
    async with serving(taskset, tmp_path) as url:
        recipe = await make_harness({"theirs": {"url": url}}, episode_timeout_s=400.0)
        await publish(bus, make_prompt(run_name, environment="theirs", sampling=LONG, extra={"index": 0}, **TEXT))
        async with working(recipe):
            [group] = await until_done(bus, 1, timeout_s=START_S)
    assert isinstance(engine.answer, Speaker)
    for sample in group.samples:
        assert (sample.error, sample.reward, sample.verdict) == ("", reward, None)
        assert {name: sample.metrics[name] for name in metrics} == metrics
        [sequence] = sample.sequences
        expected = [number for text in said for number in engine.answer.ids(text)]
        assert sequence.token_ids[sequence.loss_mask].tolist() == expected
        assert len(sequence.images) == num_images
        assert len(set(sequence.images)) == num_images


@pytest.mark.timeout(600)
async def test_a_row_beyond_the_taskset_costs_its_sample(tmp_path: Path) -> None:
    """The service says which number it was and how many tasks there are."""
    async with serving("count_letters", tmp_path) as url, httpx.AsyncClient(timeout=60) as client:
        given = {"base_url": "http://127.0.0.1:9", "api_key": "k", "model": "policy", "timeout_s": 10.0}
        answer = (await client.post(url, json={**given, "task": {"extra": {"index": 3}}})).json()
    assert answer == {"error": "ValueError: index = 3: the taskset has 3 tasks; write its rows again"}
