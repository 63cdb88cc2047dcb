"""Packed rows and group rows against what real SGLang reported of the tokens that it sampled."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.bus.image_store import hash_of
from penstock.model.tokens import forbidden_token_ids
from penstock.records import Group, GroupId, Sample, TokenSequence, Verdict, VersionSpan
from penstock.v1 import generate_pb2
from services.rollout.testing.engine_process import EngineProcess
from services.trainer.backend.policy.load_model import load_policy
from services.trainer.batching.packing import pack
from services.trainer.batching.rows import build_row
from services.trainer.batching.sequences import open_reader
from tests.support.engine.reference import Reference, picture, prompt, request

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.usefixtures("rendezvous", "engine_forker")]

TEMPERATURE = 0.7
MAX_DLOGP = 1e-5
"""In nats: samples of a few dozen tokens add up less rounding than those of a run."""
IMAGES = [[], [picture(96, 96)], [picture(200, 130, seed=1)], [picture(96, 96, seed=2), picture(150, 101, seed=3)]]
"""Of each group: text only, pictures of two sizes, two pictures."""
VERDICT = Verdict(score=0.0, status="OK", extracted="", method="test")


def played(prompt_ids: Sequence[int], images: Sequence[bytes], answer: generate_pb2.GenerateResponse) -> Sample:
    """The sample that a worker makes of an answer."""
    num_own = len(answer.output_ids)
    mask = np.array([False] * len(prompt_ids) + [True] * num_own)
    logprobs = np.zeros(len(mask), dtype=np.float32)
    logprobs[mask] = answer.logprobs
    sequence = TokenSequence(
        token_ids=np.array([*prompt_ids, *answer.output_ids], dtype=np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        version_spans=(VersionSpan(num_tokens=num_own, policy_version=1),),
        images=tuple(map(hash_of, images)),
        num_prompt_tokens=answer.usage.num_prompt_tokens,
        num_last_turn_tokens=num_own,
    )
    return Sample(sequences=(sequence,), reward=0.0, finish_reason="stop", verdict=VERDICT, turns=(), text="")


@pytest.mark.parametrize("share_prompts", [True, False])
async def test_rows_have_the_engines_logprobs(
    engine: EngineProcess, current: Reference, tmp_path: Path, tiny_model_path: Path, share_prompts: bool
) -> None:
    """Groups of text and of pictures in one row, sampled by the engine: every token's logprob up to rounding."""
    rng = random.Random(3)
    prompts = [prompt(rng, num_images=len(images), image_id=current.image_id) for images in IMAGES]
    requests = [
        request(ids, images, temperature=TEMPERATURE)
        for ids, images in zip(prompts, IMAGES, strict=True)
        for _ in range(3)
    ]
    answers = await asyncio.gather(*(engine.generation.Generate(each, timeout=60) for each in requests))

    current.model.save_pretrained(tmp_path / "weights")
    policy = load_policy(
        tmp_path / "weights", temperature=TEMPERATURE, forbidden_ids=forbidden_token_ids(tiny_model_path)
    )
    reader = open_reader(tiny_model_path)
    stored = {hash_of(image): image for images in IMAGES for image in images}
    sequences = []
    for index, (ids, images) in enumerate(zip(prompts, IMAGES, strict=True)):
        samples = tuple(played(ids, images, answer) for answer in answers[3 * index : 3 * index + 3])
        group_id = GroupId(run_id="run", index=index, attempt=0, trainer_epoch="a")
        group = Group(id=group_id, num_samples=3, samples=samples, worker_id="test")
        sequences += reader.read(group, stored).sequences

    groups, everything = [number // 3 for number in range(len(sequences))], range(len(sequences))
    [plan] = pack(sequences, groups, everything, max_tokens=100_000, share_prompts=share_prompts)
    row = build_row(sequences, plan)
    num_unshared = sum(sequence.num_inputs for sequence in sequences)
    assert (row.num_tokens < num_unshared) is share_prompts
    with torch.no_grad():
        logprobs_N = policy(row).logprobs_N
    assert (logprobs_N - row.engine_logprobs_N).abs().max() < MAX_DLOGP
