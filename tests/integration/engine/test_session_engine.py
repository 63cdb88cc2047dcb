"""An agent's session at real SGLang, and the trainer's own logprobs of the sequence that it becomes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.bus.connection import connect
from penstock.bus.image_store import hash_of
from penstock.config import BusConfig
from penstock.model.chat.chat_template import Renderer
from penstock.records import Sample, Sampling
from services.rollout.testing.engine_process import EngineProcess
from services.rollout.worker.agents.linearize import linearize, turns_of
from tests.support.engine.reference import TOLERANCE, Reference, picture
from tests.support.engine.trained_logprobs import policy_of, trained_logprobs
from tests.support.router.agent_session import agent_session
from tests.support.router.openai_harness import Harness, data_url
from tests.support.router.process import router_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.usefixtures("rendezvous")]

TEMPERATURE = 0.7
ZOOM: Any = {
    "type": "function",
    "function": {"name": "zoom", "description": "Enlarges.", "parameters": {"type": "object", "properties": {}}},
}


def shown(image: bytes) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "image_url", "image_url": {"url": data_url(image)}}


async def test_a_session_with_images_and_a_tool_call_has_the_logprobs_of_the_trainers_model(
    engine: EngineProcess, current: Reference, tiny_model_path: Path, nats_url: str
) -> None:
    """Two calls, the first of which begins a tool call, the second of which brings the tool's picture: one sequence, to
    rounding by transformers and by the trainer's own path from record to batch."""
    run = engine.log.parent.name
    version = (await engine.replica()).policy_version
    first, second = picture(150, 101, seed=1), picture(96, 96, seed=2)
    messages: list[Any] = [{"role": "user", "content": [shown(first), {"type": "text", "text": "Find x."}]}]
    sampling = Sampling(temperature=TEMPERATURE, max_new_tokens=24)
    async with (
        router_process(nats_url, run, tiny_model_path, "--run.grace_s=0") as router,
        connect(BusConfig(url=nats_url), run=run) as bus,
    ):
        harness = Harness(run=run, bus=bus, engines=(), routers=[router], renderer=Renderer.load(tiny_model_path))
        async with agent_session(harness, sampling=sampling, min_version=version, tools=(ZOOM,)) as agent:
            named = {"type": "function", "function": {"name": "zoom"}}
            answer = await agent.ask(messages, tools=[ZOOM], tool_choice=named)
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
            messages.append({"role": "tool", "tool_call_id": "1", "content": [shown(second)]})
            await agent.ask(messages)
            calls = await agent.sessions.read(agent.opened.id)
    images = {hash_of(image): image for image in (first, second)}
    [sequence] = linearize(calls)
    assert sequence.images == (hash_of(first), hash_of(second))
    assert '<tool_call>\n{"name": "zoom"' in harness.renderer.decode(sequence.token_ids.tolist())
    outputs = [call.output_ids for _, call in calls]
    assert sequence.token_ids[sequence.loss_mask].tolist() == [number for each in outputs for number in each]
    assert [(span.num_tokens, span.policy_version) for span in sequence.version_spans] == [
        (sum(map(len, outputs)), version)
    ]
    recorded = torch.from_numpy(sequence.logprobs[sequence.loss_mask])
    sample = Sample(
        sequences=(sequence,), reward=0.0, verdict=None, finish_reason="stop", turns=turns_of(calls), text=""
    )
    policy = policy_of(current, tiny_model_path, temperature=TEMPERATURE)
    assert (recorded - trained_logprobs(policy, sample, images, tiny_model_path)).abs().max() < TOLERANCE
    num_last = len(outputs[1])
    expected, num_prompt = current.logprobs(
        sequence.token_ids[:-num_last].tolist(), [first, second], outputs[1].tolist(), temperature=TEMPERATURE
    )
    assert calls[1][1].num_prompt_tokens == num_prompt
    assert (recorded[-num_last:] - expected).abs().max() < TOLERANCE
