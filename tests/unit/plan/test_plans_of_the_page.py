"""docs/training/models.md: the numbers of its plans are those that `penstock plan` computes, for two of its rows.

The number of parameters says that the shapes here are right.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.config import load
from penstock.shipped import find_recipe
from services.plan.memory_plan import plan_memory
from services.plan.process_plan import GIB, Gpus, ProcessPlan
from services.recipe import Recipe
from tests.conftest import ROOT
from tests.support.trainer.families import random_qwen3
from tests.unit.plan.test_published_towers import QWEN3_VL_4B, shape_of

COLUMNS = ("model", "parameters", "trainer", "rank 0", "host", "engine", "weights", "cache", "fits")
COMPUTED = ("parameters", "rank 0", "host", "weights", "cache")


def rows_of_the_page() -> dict[str, dict[str, str]]:
    """Those of runs that fit, by model; "the same" is the model of the row before."""
    _, _, plans = (ROOT / "docs/training/models.md").read_text().partition("\n## Plans\n")
    rows, before = {}, {"model": "", "parameters": ""}
    for line in plans.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != len(COLUMNS) or cells[0] in ("model", "---"):
            continue
        row = dict(zip(COLUMNS, cells, strict=True))
        row["model"] = row["model"].replace("the same", before["model"].partition(",")[0])
        row["parameters"] = row["parameters"] or before["parameters"]
        before = row
        if row["fits"].startswith("yes"):
            rows[row["model"]] = row
    return rows


def write_4b_with_a_tower(folder: Path) -> None:
    """Qwen3-VL-4B's config.json."""
    shape_of(QWEN3_VL_4B, (36, 24), folder)


def write_32b(folder: Path) -> None:
    """Qwen3-32B's config.json."""
    sizes = {
        **{"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "layer_types": None},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    }
    small = random_qwen3().config
    type(small).from_dict(small.to_dict() | sizes).save_pretrained(folder)


def fullest(process: ProcessPlan) -> int:
    """The most bytes at a time."""
    return max(moment.total_bytes for moment in process.moments)


def as_on_the_page(num_tokens: int) -> str:
    """In words."""
    return f"{num_tokens / 1e6:.1f} million tokens" if num_tokens >= 1e6 else f"{num_tokens / 1e3:.0f} thousand tokens"


@pytest.mark.slow
@pytest.mark.parametrize(("model", "write_config"), [("Qwen3-VL-4B", write_4b_with_a_tower), ("Qwen3-32B", write_32b)])
def test_a_row_says_what_is_planned(model: str, write_config: Callable[[Path], None], tmp_path: Path) -> None:
    """By the recipe that the page names, on GPUs as the row has them, which the run fits."""
    row = rows_of_the_page()[model]
    write_config(tmp_path)
    said = re.fullmatch(r"yes: (\d+) engines and (?:the trainer|\d+ ranks) on (\d+) GPUs", row["fits"])
    assert said is not None
    given = [
        f"--model.path={tmp_path}",
        f"--rollout.replicas={said[1]}",
        f"--rollout.tensor_parallel={row['engine'].split()[0]}",
        f"--trainer.ranks={row['trainer'].split()[0]}",
    ]
    recipe = load(Recipe, [find_recipe(Path("slime-geo3k-grpo"))], ["--rollout.gpu_memory_fraction=0.85", *given])
    plan = plan_memory(tmp_path, recipe, Gpus.parse(f"{said[2]}x80"), image_share=0.25)
    engine, rank_0, *others = plan.processes
    (num_tokens,) = (int(number.replace(",", "")) for number in re.findall(r"holds ([\d,]+) tokens", engine.notes[0]))
    computed = {
        "parameters": f"{plan.shape.num_parameters / 1e9:.2f} billion",
        "rank 0": f"{fullest(rank_0) / GIB:.1f} GiB",
        "host": f"{max(moment.total_bytes for moment in plan.host) / GIB:,.0f} GiB",
        "weights": f"{engine.moments[0].parts[0].size_bytes / GIB:.1f} GiB",
        "cache": as_on_the_page(num_tokens),
    }
    assert computed == {name: row[name] for name in COMPUTED}
    assert plan.fits
    assert all(fullest(other) <= fullest(rank_0) for other in others)
