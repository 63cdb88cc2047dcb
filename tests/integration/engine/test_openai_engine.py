"""Calls of a black-box agent to real SGLang, and the trainer's own logprobs of what was recorded of them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from openai import AsyncOpenAI

from penstock.bus.connection import connect
from penstock.bus.image_store import hash_of
from penstock.bus.recordings import Recordings
from penstock.config import BusConfig
from penstock.records import Verdict
from services.rollout.testing.engine_process import EngineProcess
from tests.support.engine.reference import TOLERANCE, Reference, picture
from tests.support.engine.trained_logprobs import policy_of, trained_logprobs
from tests.support.router.openai_harness import data_url
from tests.support.router.process import router_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.usefixtures("rendezvous")]

TEMPERATURE = 0.7
NO_VERDICT = Verdict(score=0.0, status="OK", extracted="", method="EXACT")


async def test_recorded_calls_have_the_logprobs_of_the_trainers_model(
    engine: EngineProcess, current: Reference, tiny_model_path: Path, nats_url: str
) -> None:
    """Chats with images and without, streamed and whole, cut by a stop string and not, and a plain completion: to
    rounding by transformers and by the trainer's own path from record to batch. An image that is none is refused by the
    engine, which says so."""
    run = engine.log.parent.name
    version = (await engine.replica()).policy_version
    policy = policy_of(current, tiny_model_path, temperature=TEMPERATURE)
    images = [picture(150, 101, seed=1), picture(96, 96, format="JPEG")]
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    looked = [{"role": "user", "content": [*parts, {"type": "text", "text": "Find x."}]}]
    plain = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "What is 2 + 3?"}]
    async with (
        router_process(nats_url, run, tiny_model_path, "--run.grace_s=0") as router,
        AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client,
        connect(BusConfig(url=nats_url), run=run) as bus,
    ):
        create = client.chat.completions.create
        options = {"model": run, "temperature": TEMPERATURE, "max_tokens": 24, "user": "agent"}
        answer = await create(messages=looked, n=2, logprobs=True, extra_body={"record": True}, **options)
        assert answer.system_fingerprint == f"policy-{version}"
        stream = await create(messages=looked, stream=True, extra_body={"record": True}, **options)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        await create(messages=plain, stop=["e", "a", "1", " "], extra_body={"record": True}, **options)
        completed = await client.completions.create(prompt="2 + 3 =", extra_body={"record": True}, **options)
        assert completed.system_fingerprint == f"policy-{version}"
        with pytest.raises(Exception, match=r"images\[0\] .* cannot be decoded") as refused:
            await create(
                messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(b"no")}}]}],
                **options,
            )
        assert getattr(refused.value, "status_code", None) == 400
        calls = [call for _, call in (await Recordings(bus).read("agent")).calls]
    assert [len(call.images) for call in calls] == [2, 2, 2, 0, 0]
    assert calls[2].text == text
    assert calls[4].text == completed.choices[0].text
    for call, choice in zip(calls, answer.choices, strict=False):
        assert call.text == choice.message.content
        assert call.logprobs.tolist() == pytest.approx([entry.logprob for entry in choice.logprobs.content])
    for call in calls:
        assert list(call.images) == images[: len(call.images)]
        assert {span.policy_version for span in call.version_spans} == {version}
        recorded = torch.from_numpy(np.array(call.logprobs))
        expected, num_prompt = current.logprobs(
            call.input_ids.tolist(), call.images, call.output_ids.tolist(), temperature=TEMPERATURE
        )
        assert call.num_prompt_tokens == num_prompt
        assert (recorded - expected).abs().max() < TOLERANCE
        sample = call.to_sample(NO_VERDICT, tuple(map(hash_of, call.images)))
        shown = {hash_of(data): data for data in call.images}
        assert (recorded - trained_logprobs(policy, sample, shown, tiny_model_path)).abs().max() < TOLERANCE
