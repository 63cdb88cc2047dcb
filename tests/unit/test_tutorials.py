"""The tutorials show the examples as they are, and their script makes rows that can be trained on."""

from pathlib import Path

import pytest

from penstock import config, shipped
from services.launch.checks.row_check import check_rows
from services.recipe import Recipe
from tests.conftest import ROOT
from tests.support.documents.blocks import blocks_of

_TUTORIALS = ROOT / "docs" / "tutorials"


@pytest.mark.parametrize(
    ("tutorial", "shown"),
    [
        ("your-reward", ["reward/near.py", "reward/recipe.toml"]),
        ("your-environment", ["environment/second_chance.py", "environment/recipe.toml"]),
        ("your-agent", ["agent/retry_agent.py", "agent/recipe.toml"]),
    ],
)
def test_a_tutorial_shows_the_example(tutorial: str, shown: list[str]) -> None:
    """Line for line."""
    blocks = [block.text for block in blocks_of((_TUTORIALS / f"{tutorial}.md").read_text())]
    assert [file for file in shown if (ROOT / "examples" / file).read_text() not in blocks] == []


def test_the_rows_of_the_tutorial_can_be_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its script and its overlay, as they stand there; the tiny recipe's evaluation sets find enough rows in them."""
    monkeypatch.chdir(tmp_path)
    blocks = {block.language: block.text for block in blocks_of((_TUTORIALS / "your-data.md").read_text())}
    exec(compile(blocks["python"], "make_rows.py", "exec"), {"__name__": "__main__"})
    Path("my-data.toml").write_text(blocks["toml"])
    recipe = config.load(Recipe, [shipped.recipes()["tiny-cpu"], Path("my-data.toml")], ["--data.cache_dir=cache"])
    said = list[str]()
    check_rows(recipe, with_sets=True, say=said.append)
    assert len(Path("my-data/train.jsonl").read_text().splitlines()) == 256
    assert not any("unread" in line for line in said)
