"""Rows of one round take about equally long: what pictures and long samples cost beside tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.backend.policy.planned_rows import PlannedRows
from services.trainer.backend.policy.relative_costs import relative_costs
from services.trainer.backend.ranks.ranks import Ranks
from services.trainer.batching.packing import Block, Row
from services.trainer.batching.row_costs import RowCosts, num_pairs
from services.trainer.batching.sequences import TrainSequence, open_reader
from tests.support.trainer.families import random_qwen3, random_qwen3_5_text, random_qwen3_moe, random_qwen3_vl
from tests.support.trainer.groups import BOILERPLATE, IMAGES, make_group, num_placeholders, picture

TEXT = BOILERPLATE + 7
"""Tokens of a prompt without pictures."""


def row_of(*lengths: int) -> tuple[Row, list[int]]:
    """A row of sequences that share nothing, and their lengths."""
    return tuple(Block(sequences=(number,), prefix_length=0) for number in range(len(lengths))), list(lengths)


def test_pairs_are_counted_once() -> None:
    """By hand: 3 tokens have 1 + 2 + 3; behind a prefix of 4, 2 tokens have 5 + 6 and 1 has 5, the prefix 10."""
    assert num_pairs(*row_of(3)) == 6
    assert num_pairs((Block(sequences=(0, 1), prefix_length=4),), [6, 5]) == 10 + 11 + 5


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_a_row_of_one_sequence_has_the_most_pairs(lengths: list[int]) -> None:
    """Of all rows with as many tokens."""
    assert num_pairs(*row_of(*lengths)) <= num_pairs(*row_of(sum(lengths)))


def test_costs_are_those_of_the_models_products() -> None:
    """By hand, for 4 heads of 16 in 3 layers: 2 x 4 x 16 for each pair and layer, against a layer's parameters."""
    dense = random_qwen3()
    layer = sum(parameter.numel() for parameter in dense.model.layers[0].parameters())
    assert relative_costs(dense).per_pair == pytest.approx(2 * 4 * 16 / layer)
    assert relative_costs(dense).per_patch == 0
    mixture = random_qwen3_moe()
    of_layer = {name: parameter.numel() for name, parameter in mixture.model.layers[0].named_parameters()}
    chosen = sum(size * 2 // 6 if "experts" in name else size for name, size in of_layer.items())
    assert relative_costs(mixture).per_pair == pytest.approx(2 * 4 * 16 / chosen)
    linear = random_qwen3_5_text()  # one layer of 4 heads of 32 attends; three have 4 states of 16 x 16
    layers = sum(each.numel() for each in linear.model.layers.parameters())
    assert relative_costs(linear).per_pair == pytest.approx(2 * 4 * 32 / (layers + 3 * 3 * 4 * 16 * 16))
    shown = random_qwen3_vl()
    tower = sum(each.numel() for name, each in shown.model.visual.named_parameters() if "merger" not in name)
    layers = sum(each.numel() for each in shown.model.language_model.layers.parameters())
    assert relative_costs(shown).per_patch == pytest.approx(tower / layers)


def read(path: Path, *own_lengths: int, size: tuple[int, int] | None = None) -> list[TrainSequence]:
    """Sequences of a group: `TEXT - 1` tokens that are read, `own_lengths` of the policy's, and a picture if any."""
    shown: dict[str, Any] = {}
    if size is not None:
        shown = {"images": [picture(0, size=size)], "placeholders": [num_placeholders(size)]}
    group = make_group(path, rewards=[0.0] * len(own_lengths), own_lengths=own_lengths, **shown)
    return list(open_reader(path).read(group, IMAGES).sequences)


def rounds(rows: list[list[TrainSequence]], costs: RowCosts) -> list[set[int]]:
    """Which rows two ranks compute at the same time."""
    sequences = [sequence for row in rows for sequence in row]
    numbers = iter(range(len(sequences)))
    of_ranks = [
        PlannedRows(
            sequences=sequences,
            samples=range(len(sequences)),
            plan=plan,
            row_lengths=[0] * len(rows),
            device=torch.device("cpu"),
            ranks=Ranks(rank=rank, size=2),
            costs=costs,
        )
        for plan in [[tuple(Block(sequences=(next(numbers),), prefix_length=0) for _ in row) for row in rows]]
        for rank in range(2)
    ]
    return [{row.number for row in together} for together in zip(*of_ranks, strict=True)]


def num_tokens(rows: list[list[TrainSequence]]) -> list[int]:
    """Of each row."""
    return [sum(sequence.num_inputs for sequence in row) for row in rows]


def test_rows_with_pictures_are_computed_at_the_same_time(tiny_model_path: Path) -> None:
    """Though rows without any have about as many tokens: the tower's patches decide."""
    costs, size = relative_costs(random_qwen3_vl()), (224, 224)
    others = 120 - TEXT - num_placeholders(size)  # a picture is followed by a token of its own
    rows = [
        read(tiny_model_path, 121 - TEXT),
        read(tiny_model_path, others - 2, size=size),
        read(tiny_model_path, 117 - TEXT),
        read(tiny_model_path, others - 6, size=size),
    ]
    assert num_tokens(rows) == [120, 118, 116, 114]
    assert rounds(rows, costs) == [{1, 3}, {0, 2}]
    assert rounds(rows, RowCosts(per_pair=costs.per_pair, per_patch=0.0)) == [{0, 1}, {2, 3}]


def test_dealing_out_rows_measures_each_sequence_equally_often(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice as many rows read twice as many lengths, not four times: a length is a search in the tokens."""
    measured: list[TrainSequence] = []
    num_inputs: Any = vars(TrainSequence)["num_inputs"]

    def noted(sequence: TrainSequence) -> int:
        measured.append(sequence)
        return int(num_inputs.fget(sequence))

    sequences = [read(tiny_model_path, 121 - TEXT) for _ in range(16)]
    monkeypatch.setattr(TrainSequence, "num_inputs", property(noted))
    counts = []
    for rows in (sequences[:8], sequences):
        measured.clear()
        rounds(rows, RowCosts())
        counts.append(len(measured))
    assert counts[1] == 2 * counts[0]


def test_rows_of_one_long_sample_are_computed_at_the_same_time(tiny_model_path: Path) -> None:
    """Though rows of short ones have more tokens: attention decides."""
    costs = relative_costs(random_qwen3_vl())
    rows = [
        read(tiny_model_path, *[41 - TEXT] * 3),
        read(tiny_model_path, 119 - TEXT),
        read(tiny_model_path, *[40 - TEXT] * 3),
        read(tiny_model_path, 117 - TEXT),
    ]
    assert num_tokens(rows) == [120, 118, 117, 116]
    assert rounds(rows, costs) == [{1, 3}, {0, 2}]
    assert rounds(rows, RowCosts(per_pair=0.0)) == [{0, 1}, {2, 3}]
