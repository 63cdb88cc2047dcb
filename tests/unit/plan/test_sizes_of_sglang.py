"""An engine's weights and KV cache, as the installed SGLang makes them for one process and for two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.config import load
from services.plan.engine_plan import plan_engine
from services.plan.model_shape import ModelShape
from services.plan.process_plan import Gpus
from services.recipe import Recipe
from tests.support.trainer.families import random_qwen3, random_qwen3_moe, random_qwen3_vl_moe

MODELS = {"dense": random_qwen3, "mixture": random_qwen3_moe, "pictures": random_qwen3_vl_moe}
PADDING = {"dense": 0, "mixture": 0, "pictures": 2 * (64 - 36) * 64}
"""Bytes by which SGLang fills the tower's 36 positions of 64 numbers up to 64; the published 2,304 need none."""
CONTEXT = 1000


def planned(model: Path, tensor_parallel: int) -> tuple[int, int]:
    """Bytes of the weights on a GPU, and of a token in its cache."""
    settings = (f"--rollout.tensor_parallel={tensor_parallel}", f"--rollout.context_length={CONTEXT}")
    recipe = load(Recipe, [], [f"--model.path={model}", *settings])
    plan = plan_engine(ModelShape.read(model), recipe, Gpus.parse("8x80"), count=1, free_bytes=0)
    weights, cache = plan.moments[0].parts
    return weights.size_bytes, cache.size_bytes // CONTEXT


@pytest.mark.slow
def test_sglang_takes_what_is_planned(tmp_path: Path) -> None:
    """Of two processes each has half of the weights, all norms, routers and what embeds patches."""
    for name, make in MODELS.items():
        model = make()
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(tmp_path / name)
    command = [sys.executable, "-m", "tests.support.engine.sglang_sizes", *(str(tmp_path / name) for name in MODELS)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}  # SGLang's imports leave folders there
    said = subprocess.run([*command, "1", "2"], env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = [json.loads(line) for line in said.splitlines() if line.startswith('["')]
    assert len(found) == 2 * len(MODELS)
    for path, tensor_parallel, sizes in found:
        weights, token = planned(Path(path), tensor_parallel)
        assert sizes["token"] == token
        assert sizes["weights"] == weights + PADDING[Path(path).name] // tensor_parallel, (path, tensor_parallel)
