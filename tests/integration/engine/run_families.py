"""Every family that is trained on real SGLang, two engines each. Not collected by default: `make test-families`."""

from pathlib import Path

import pytest

from tests.support.engine.family import engine_of, require_same_through_pushes
from tests.support.engine.reference import Reference
from tests.support.trainer.families import FAMILIES, heard, write_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.usefixtures("rendezvous")]


COMPARED = [kind for kind in FAMILIES if kind not in ("qwen2_vl", "qwen2_5_vl")]
"""Those two do not agree yet where there are pictures: the tiny Qwen2.5-VL ends SGLang with more rows of its tower than
tokens, the tiny Qwen2-VL has other log-probabilities. Whether that is the models' sizes or a fault is not found out."""


@pytest.mark.leaves_behind("transformers' progress bar keeps a thread", "thread")
@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("kind", COMPARED)
async def test_a_family_is_the_trainers_model_before_and_after_pushes(
    kind: str, tensor_parallel: int, nats_url: str, tmp_path: Path
) -> None:
    """Texts and pictures: |dlogp| within 1e-5 of transformers', after pushes too."""
    model = write_model(heard(FAMILIES[kind](), std_of_embedding=0.3), tmp_path / kind)
    async with engine_of(model, nats_url, tmp_path, tensor_parallel=tensor_parallel) as engine:
        await require_same_through_pushes(engine, Reference(model))
