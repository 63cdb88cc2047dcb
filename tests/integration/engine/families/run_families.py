"""Every family that is trained on real SGLang: engines of one process and of two, which divide experts in both ways.

Not collected by default: `make test-families`.
"""

from pathlib import Path

import grpc
import pytest

from services.rollout.testing.engine_process import engine_process
from tests.support.engine.family import engine_of, require_same_through_pushes
from tests.support.engine.push import Push
from tests.support.engine.reference import Reference, request
from tests.support.trainer.families import (
    FAMILIES,
    LINEAR_FAMILIES,
    MIXTURES,
    heard_in_engines,
    write_model,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.usefixtures("rendezvous")]


@pytest.mark.leaves_behind("transformers' progress bar keeps a thread", "thread")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((kind, {"tensor_parallel": 1}) for kind in FAMILIES),
        *((kind, {"tensor_parallel": 2}) for kind in FAMILIES),
        *((kind, {"tensor_parallel": 2, "expert_parallel": 2}) for kind in MIXTURES),
    ],
    ids=str,
)
async def test_a_family_is_the_trainers_model_before_and_after_pushes(
    kind: str, settings: dict[str, int], nats_url: str, tmp_path: Path
) -> None:
    """Texts and pictures: |dlogp| within 1e-5 of transformers', after pushes too."""
    model = write_model(heard_in_engines(kind), tmp_path / kind)
    async with engine_of(model, nats_url, tmp_path, **settings) as engine:
        await require_same_through_pushes(engine, Reference(model))


@pytest.mark.leaves_behind("transformers' progress bar keeps a thread", "thread")
@pytest.mark.parametrize("kind", LINEAR_FAMILIES)
async def test_an_engine_in_half_precision_takes_decays_in_float32(kind: str, nats_url: str, tmp_path: Path) -> None:
    """As it loads them, through SGLang's loader and into its parameters, and in no other precision."""
    model = write_model(heard_in_engines(kind), tmp_path / kind)
    async with engine_process(model, nats_url, tmp_path, grace_s=2.0, max_running=8, dtype="bfloat16") as engine:
        weights = Reference(model).weights
        asked = request(list(range(3, 60)), max_new_tokens=40, temperature=0.0)
        loaded = await engine.generation.Generate(asked, timeout=120)
        for version in (1, 2):
            halved = {name: (weight + (version - 1)).bfloat16() for name, weight in weights.items()}
            pushed = {name: weight.float() if name.endswith(".A_log") else weight for name, weight in halved.items()}
            await Push(engine, pushed, version).complete()
            answer = await engine.generation.Generate(asked, timeout=120)
            is_same = (answer.output_ids, answer.logprobs) == (loaded.output_ids, loaded.logprobs)
            assert is_same == (version == 1), "the checkpoint's weights, and others"
        with pytest.raises(grpc.aio.AioRpcError, match=r"A_log is bfloat16\[4\], the engine holds float32\[4\]"):
            await Push(engine, halved, 3).prepare_only()
