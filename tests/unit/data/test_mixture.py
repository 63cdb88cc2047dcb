"""Several sources: shares, orders, and that a position alone says what is played."""

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.config import Config, dump, load
from penstock.errors import ConfigError
from services.trainer.data.config import DataConfig
from services.trainer.data.dataset import Dataset, open_dataset
from services.trainer.data.mixture import BLOCK, Mixture


class WithData(Config):
    """A recipe with the section."""

    data: DataConfig = DataConfig()


def sources(tmp_path: Path, rows: dict[str, int], **weights: float) -> dict[str, Any]:
    """Settings of sources with this many rows, whose answers name the source and the row."""
    for name, number in rows.items():
        answers = [f"{name}{row}" for row in range(number)]
        pq.write_table(pa.table({"problem": ["?"] * number, "answer": answers}), tmp_path / f"{name}.parquet")
    return {name: {"path": f"{tmp_path}/{name}.parquet", "weight": weights.get(name, 1.0)} for name in rows}


def golds(dataset: Dataset, positions: range) -> list[str]:
    """What is played there."""
    return [dataset[position].golds[0] for position in positions]


def test_every_block_has_the_shares_of_the_weights() -> None:
    """Rounded to a thousandth, and in another order in each block and for each seed."""
    mixture = Mixture({"a": 1, "b": 2, "c": 0.7}, seed=5)
    blocks = [[mixture.at(block * BLOCK + place)[0] for place in range(BLOCK)] for block in range(3)]
    assert [Counter(block) for block in blocks] == [Counter({1: 541, 0: 270, 2: 189})] * 3
    assert blocks[0] != blocks[1]
    assert [Mixture({"a": 1, "b": 2, "c": 0.7}, seed=6).at(place)[0] for place in range(BLOCK)] != blocks[0]


def test_each_source_is_counted_by_itself() -> None:
    """Its positions are 0, 1, 2 and so on over the borders of blocks, also when they are asked for backwards."""
    mixture = Mixture({"a": 1, "b": 9}, seed=5)
    found = [mixture.at(position) for position in range(2 * BLOCK + 500)]
    for source in (0, 1):
        assert [place for each, place in found if each == source] == list(
            range(sum(each == source for each, _ in found))
        )
    assert [mixture.at(position) for position in reversed(range(len(found)))] == found[::-1]


def test_a_resumed_run_plays_the_rest_of_the_mixture(tmp_path: Path) -> None:
    """Position by position, without what came before; each source plays all its rows before it repeats one."""
    config = DataConfig.model_validate({"sources": sources(tmp_path, {"a": 7, "b": 4}, a=3)})
    whole = golds(open_dataset(config, seed=1), range(60))
    assert golds(open_dataset(config, seed=1), range(41, 60)) == whole[41:]
    assert golds(open_dataset(config, seed=2), range(60)) != whole
    of_a = [gold for gold in whole if gold[0] == "a"]
    assert all(len(set(of_a[first : first + 7])) == 7 for first in range(0, len(of_a) - 6, 7))
    assert of_a[:7] != of_a[7:14]


def test_another_source_moves_no_row_of_the_others(tmp_path: Path) -> None:
    """Each has an order of its own; one source alone has the order that `path` has."""
    two = DataConfig.model_validate({"sources": sources(tmp_path, {"a": 30, "b": 4})})
    three = DataConfig.model_validate({"sources": sources(tmp_path, {"a": 30, "b": 4, "c": 9})})
    firsts = [
        [gold for gold in golds(open_dataset(each, seed=1), range(120)) if gold[0] == "a"][:30] for each in (two, three)
    ]
    assert firsts[0] == firsts[1]


def test_a_source_takes_from_data_what_it_leaves_out(tmp_path: Path) -> None:
    """Reading a dumped recipe again changes nothing, and another value in `[data]` still reaches the sources."""
    recipe, settings = tmp_path / "r.toml", sources(tmp_path, {"a": 1, "b": 1})
    recipe.write_text(
        f'[data]\nprompt_suffix = "!"\nprofile = "math"\n[data.sources.a]\npath = "{settings["a"]["path"]}"\n'
        f'[data.sources.b]\npath = "{settings["b"]["path"]}"\nprofile = "mcq"\n'
    )
    loaded = load(WithData, [recipe], ["--data.sources.b.weight=3"])
    assert [(each.prompt_suffix, each.profile) for each in loaded.data.by_name.values()] == [
        ("!", "math"),
        ("!", "mcq"),
    ]
    recipe.write_text(dump(loaded))
    assert load(WithData, [recipe]) == loaded
    resumed = load(WithData, [recipe], ["--data.prompt_suffix=?", "--data.profile=math2"])
    assert [(each.prompt_suffix, each.profile) for each in resumed.data.by_name.values()] == [
        ("?", "math2"),
        ("?", "mcq"),
    ]
    dataset = open_dataset(loaded.data)
    assert {dataset[position].profile: dataset[position].golds for position in range(50)} == {
        "math": ("a0",),
        "mcq": ("b0",),
    }


def test_a_split_of_the_mixture_holds_for_files_of_that_split(tmp_path: Path) -> None:
    """Of another one, a source says that its file is meant all the same."""
    both = sources(tmp_path, {"a": 1, "b": 1})
    assert open_dataset(DataConfig.model_validate({"split": "train", "sources": both})).num_rows == 2
    with pytest.raises(ConfigError, match=r"a\.parquet' is of one split, 'train' by its name, .*; .* set split = \"\""):
        open_dataset(DataConfig.model_validate({"split": "test", "sources": both}))
    both = {name: {**source, "split": ""} for name, source in both.items()}
    assert open_dataset(DataConfig.model_validate({"split": "test", "sources": both})).num_rows == 2


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"path": "a.parquet", "sources": {"a": {}}}, "path and sources exclude each other"),
        ({"sources": {"a": {"weight": 0}}}, r"data\.sources\.a\.weight = '0'"),
        (
            {"sources": {"a": {"wieght": 1}}},
            r"unknown key data\.sources\.a\.wieght; did you mean .*a\.weight\?",
        ),
        ({"min_pixels": 9, "max_pixels": 8}, "max_pixels = 8 is below min_pixels = 9"),
    ],
)
def test_settings_that_contradict_each_other(tmp_path: Path, data: dict[str, Any], words: str) -> None:
    """Are refused with the key."""
    (tmp_path / "r.toml").write_text(dump(_Raw(data=data)))
    with pytest.raises(ConfigError, match=words):
        load(WithData, [tmp_path / "r.toml"])


class _Raw(Config):
    data: dict[str, Any]


def test_a_share_that_rounds_to_nothing_is_refused() -> None:
    """Its prompts would never be played."""
    with pytest.raises(ConfigError, match=r"data\.sources\.b\.weight = 0\.0001 is less than a thousandth"):
        Mixture({"a": 1, "b": 0.0001}, seed=0)
