"""`trainer.float32_head` in half precision: real SGLang computes its head as a trainer with the same setting."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.records import Group, GroupId, Sample, TokenSequence, Verdict, VersionSpan
from penstock.v1 import generate_pb2
from services.rollout.testing.engine_process import engine_process
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.batching.sequences import open_reader
from services.trainer.config import BackendConfig
from tests.support.engine.reference import prompt, request
from tests.support.trainer.families import heard_in_engines, write_model
from tests.support.trainer.rows import row_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("rendezvous", "engine_forker"),
]

PROMPTS = [prompt(random.Random(seed), num_images=0, image_id=None) for seed in range(8)]
VERDICT = Verdict(score=0.0, status="OK", extracted="", method="test")


def played(ids: Sequence[int], answer: generate_pb2.GenerateResponse) -> Sample:
    """The sample that a worker makes of an answer."""
    num_own = len(answer.output_ids)
    mask = np.array([False] * len(ids) + [True] * num_own)
    logprobs = np.zeros(len(mask), dtype=np.float32)
    logprobs[mask] = answer.logprobs
    sequence = TokenSequence(
        token_ids=np.array([*ids, *answer.output_ids], dtype=np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        version_spans=(VersionSpan(num_tokens=num_own, policy_version=1),),
        images=(),
        num_prompt_tokens=len(ids),
        num_last_turn_tokens=num_own,
    )
    return Sample(sequences=(sequence,), reward=0.0, finish_reason="stop", verdict=VERDICT, turns=(), text="")


async def sampled(model: Path, nats_url: str, folder: Path, *, float32_head: bool) -> Group:
    """Answers of an engine in bfloat16."""
    folder.mkdir()
    sizes = {"max_running": 8, "context_length": 512}
    async with engine_process(
        model, nats_url, folder, grace_s=2.0, dtype="bfloat16", trainer={"float32_head": float32_head}, **sizes
    ) as engine:
        asked = [request(ids, max_new_tokens=64) for ids in PROMPTS]
        answers = await asyncio.gather(*(engine.generate(each) for each in asked))
    samples = tuple(played(ids, answer) for ids, answer in zip(PROMPTS, answers, strict=True))
    group_id = GroupId(run_id="run", index=0, attempt=0, trainer_epoch="a")
    return Group(id=group_id, num_samples=len(samples), samples=samples, worker_id="test")


@torch.no_grad()
def dlogp(model: Path, group: Group, *, float32_head: bool) -> torch.Tensor:
    """|dlogp| of each token between the engine that sampled it and a trainer in bfloat16."""
    config = BackendConfig(device="cpu", dtype="bfloat16", float32_head=float32_head)
    backend = InProcessBackend(model, config, AlgorithmConfig(), seed=0, temperature=1.0)
    backend.load(None)
    row = row_of(*open_reader(model).read(group, {}).sequences)
    return (backend._model.logprobs(row).logprobs_N - row.engine_logprobs_N).abs()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose layers pass on what they get: engine and trainer round it alike, and only the heads can differ."""
    heard = heard_in_engines("qwen3")
    for name, weight in heard.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data.zero_()
    return write_model(heard, tmp_path / "model")


@pytest.mark.parametrize("float32_head", [False, True])
async def test_an_engine_multiplies_as_the_trainer_does(
    model: Path, nats_url: str, tmp_path: Path, float32_head: bool
) -> None:
    """Its head's rounding is that of a trainer with the same setting, and not of another: an engine that ignored the
    setting, or whose head was packed for other kernels, would be noticed."""
    group = await sampled(model, nats_url, tmp_path / "engine", float32_head=float32_head)
    assert dlogp(model, group, float32_head=float32_head).max() < 1e-5
    assert dlogp(model, group, float32_head=not float32_head).mean() > 5e-4
