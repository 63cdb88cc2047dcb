"""Every family that is trained on real SGLang: engines of one process and of two, which divide experts in both ways.

Not collected by default: `make test-families`.
"""

from pathlib import Path

import pytest

from tests.support.engine.family import engine_of, require_same_through_pushes
from tests.support.engine.reference import Reference
from tests.support.trainer.families import FAMILIES, MIXTURES, heard, write_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.usefixtures("rendezvous")]


@pytest.mark.leaves_behind("transformers' progress bar keeps a thread", "thread")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((kind, {"tensor_parallel": number}) for kind in FAMILIES for number in (1, 2)),
        *((kind, {"tensor_parallel": 2, "expert_parallel": 2}) for kind in MIXTURES),
    ],
    ids=str,
)
async def test_a_family_is_the_trainers_model_before_and_after_pushes(
    kind: str, settings: dict[str, int], nats_url: str, tmp_path: Path
) -> None:
    """Texts and pictures: |dlogp| within 1e-5 of transformers', after pushes too."""
    model = write_model(heard(FAMILIES[kind](), std_of_embedding=0.1), tmp_path / kind)
    async with engine_of(model, nats_url, tmp_path, **settings) as engine:
        await require_same_through_pushes(engine, Reference(model))
