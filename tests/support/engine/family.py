"""An engine with a small model of a family, and how far its log-probabilities are from transformers' in float64."""

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch

from penstock.v1 import generate_pb2
from services.rollout.testing.engine_process import EngineProcess, engine_process
from tests.support.engine.push import Push
from tests.support.engine.reference import Reference, picture, prompt, request

MOST = 1e-5
"""A float32 engine's |dlogp| against transformers in float64."""
FELT = 1e-2
"""What other weights make at least."""
TIE = 1e-5
"""Logits of two experts that are nearer than this may be in another order in the engine, whose sums round otherwise."""
PICTURES = ((96, 80), (300, 200))
"""Width and height: the tiny model's image processor enlarges the one and shrinks the other."""


class Plays(Protocol):
    """An engine, or a pair."""

    async def generate(self, request: generate_pb2.GenerateRequest) -> generate_pb2.GenerateResponse: ...


@asynccontextmanager
async def engine_of(
    model: Path,
    nats_url: str,
    folder: Path,
    *,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    router_replay: bool = False,
    sglang: Mapping[str, object] = MappingProxyType({}),
) -> AsyncIterator[EngineProcess]:
    """Run an engine with the model during the context; `sglang` are settings of `rollout.sglang`."""
    sizes = {"max_running": 8, "context_length": 512}
    sizes |= {"tensor_parallel": tensor_parallel, "expert_parallel": expert_parallel}
    trainer = {"router_replay": router_replay}
    own = {"sglang": dict(sglang)} if sglang else {}
    async with engine_process(model, nats_url, folder, grace_s=2.0, trainer=trainer, **sizes, **own) as engine:
        await engine.replica()  # the connection lasts as long as the engine
        yield engine


async def difference(engine: Plays, policy: Reference) -> float:
    """The largest |dlogp| between the engine and transformers, over texts and, where the model has eyes, pictures.

    Transformers computes in float64, so the engine's rounding is all that a right one differs by.
    """
    exact = policy.in_float64()
    found = []
    for seed in range(4):
        num_images = seed % 2 if policy.image_id is not None else 0
        images = [picture(*PICTURES[seed // 2], seed=seed)] * num_images
        ids = prompt(random.Random(seed), num_images=len(images), image_id=policy.image_id)
        for _ in range(10):  # answers are drawn at random, and in one of hundreds a router is as good as undecided
            answer = await engine.generate(request(ids, images, max_new_tokens=30))
            if exact.router_margin(ids, images, answer.output_ids) > TIE:
                break
        else:
            raise AssertionError(f"a router is undecided about prompt {seed}; choose another one")
        expected, num_prompt_tokens = exact.logprobs(ids, images, answer.output_ids, temperature=1.0)
        assert answer.usage.num_prompt_tokens == num_prompt_tokens
        found.append(float((torch.tensor(list(answer.logprobs)) - expected).abs().max()))
    return max(found)


async def require_same_through_pushes(engine: EngineProcess, policy: Reference, *, version: int = 0) -> Reference:
    """The engine has the model as `version`, and each of two that are pushed: through SGLang's loader, and into its
    parameters.

    Returns the last that was pushed, as `version` + 2.
    """
    await _require_same(engine, policy)
    newer = policy
    for number in (1, 2):
        newer = policy.perturbed(seed=number)
        await Push(engine, newer.weights, version + number).complete()
        await _require_same(engine, newer)
        assert await difference(engine, policy) > FELT
    return newer


async def _require_same(engine: EngineProcess, policy: Reference) -> None:
    found = await difference(engine, policy)
    assert found <= MOST, f"|dlogp| = {found:.2g}"
