"""Packing: every sample in one place, rows within budget and nearly full, prompts shared where they are equal."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.tokens import image_token_id
from services.trainer.backend.policy.planned_rows import TokenCounts
from services.trainer.batching.packing import Block, common_prefix_length, num_row_tokens, plan_rows
from services.trainer.batching.positions import sample_positions
from services.trainer.batching.rows import build_row, fixed_length, padded_length
from services.trainer.batching.sequences import GroupReader, TrainSequence
from services.trainer.flow.batch_source import is_chunk
from tests.support.trainer.groups import BOILERPLATE, IMAGES, make_group, picture
from tests.support.trainer.lengths import GEO3K_GROUPS, PROMPTS
from tests.support.trainer.read_groups import reader_of

batches = st.lists(
    st.tuples(st.integers(0, 60), st.lists(st.integers(1, 60), min_size=1, max_size=6)), min_size=1, max_size=12
)
"""Of each group, the length of its common prompt and of each response."""


@pytest.fixture(scope="module")
def reader(tiny_model_path: Path) -> GroupReader:
    """For the tiny model."""
    return reader_of(tiny_model_path)


def flat(batch: Sequence[tuple[int, Sequence[int]]]) -> tuple[list[int], list[int], list[int]]:
    """Lengths, groups and prefix lengths of the samples."""
    lengths = [prompt + response for prompt, responses in batch for response in responses]
    groups = [group for group, (_, responses) in enumerate(batch) for _ in responses]
    return lengths, groups, [batch[group][0] for group in groups]


@given(batches, st.integers(1, 300), st.booleans())
def test_every_sample_is_in_one_row_within_the_budget(
    batch: list[tuple[int, list[int]]], max_tokens: int, fill: bool
) -> None:
    """A row is longer than the budget only for a single sample; a block holds samples of one group."""
    lengths, groups, prefixes = flat(batch)
    rows = plan_rows(lengths, groups, prefixes, max_tokens, fill=fill)
    blocks = [block for row in rows for block in row]
    assert sorted(number for block in blocks for number in block.sequences) == list(range(len(lengths)))
    for row in rows:
        assert num_row_tokens(row, lengths) <= max_tokens or [len(block.sequences) for block in row] == [1]
    for block in blocks:
        assert len({groups[number] for number in block.sequences}) == 1
        shared = prefixes[block.sequences[0]] if len(block.sequences) > 1 else 0
        assert block.prefix_length in (0, shared)


@given(batches, st.integers(1, 300))
def test_a_group_that_fits_into_a_row_is_never_cut(batch: list[tuple[int, list[int]]], max_tokens: int) -> None:
    """Its prompt is then computed once; a larger group's as often as it has rows."""
    lengths, groups, prefixes = flat(batch)
    rows = plan_rows(lengths, groups, prefixes, max_tokens)
    for group, (prompt, responses) in enumerate(batch):
        if prompt and prompt + sum(responses) <= max_tokens:
            assert sum(any(groups[block.sequences[0]] == group for block in row) for row in rows) == 1


def test_a_large_group_fills_rows_and_leaves_its_rest_to_others() -> None:
    """By hand: a budget of 20; a group of 4 + 9 + 8 + 7 + 3, and one of 2 + 5."""
    lengths, groups, prefixes = flat([(4, [9, 8, 7, 3]), (2, [5])])
    assert plan_rows(lengths, groups, prefixes, 20) == [
        (Block(sequences=(0, 2), prefix_length=4),),
        (Block(sequences=(1, 3), prefix_length=4),),
        (Block(sequences=(4,), prefix_length=0),),
    ]
    assert plan_rows(lengths, groups, [0] * 5, 20)[0] == (
        Block(sequences=(0,), prefix_length=0),
        Block(sequences=(3,), prefix_length=0),
    )


@pytest.mark.parametrize("max_tokens", [8192, 16384, 32768])
@pytest.mark.parametrize("share", [True, False])
def test_rows_of_a_fixed_length_are_dense_on_geo3k_lengths(max_tokens: int, share: bool) -> None:
    """At least 97% full but for the last row, which takes what is left; no plan has fewer rows for these tokens."""
    lengths, groups, prefixes = flat(GEO3K_GROUPS)
    rows = plan_rows(lengths, groups, prefixes if share else [0] * len(lengths), max_tokens, fill=True)
    sizes = sorted(num_row_tokens(row, lengths) for row in rows)
    assert sum(sizes[1:]) / (len(sizes[1:]) * max_tokens) >= 0.97
    assert len(rows) == math.ceil(sum(sizes) / max_tokens)


def test_a_whole_step_of_fixed_rows_is_dense() -> None:
    """64 prompts of 8 samples, 36 rows: the last row counts for little."""
    lengths, groups, prefixes = flat(GEO3K_GROUPS * 2)
    rows = plan_rows(lengths, groups, prefixes, 8192, fill=True)
    assert sum(num_row_tokens(row, lengths) for row in rows) / (len(rows) * 8192) >= 0.97


@pytest.mark.parametrize(("max_tokens", "mean_density"), [(8192, 0.97), (16384, 0.97), (32768, 0.95)])
def test_fixed_rows_are_as_few_as_their_tokens_need(max_tokens: int, mean_density: float) -> None:
    """Or one more, over 20 draws of a step of 64 prompts. What is missing is the empty end of the last row."""
    densities = []
    for seed in range(20):
        responses = np.random.default_rng(seed).lognormal(np.log(450), 0.6, (64, 8)).clip(100, 1500).astype(int)
        drawn = list(zip(PROMPTS * 2, responses.tolist(), strict=True))
        lengths, groups, prefixes = flat(drawn)
        rows = plan_rows(lengths, groups, prefixes, max_tokens, fill=True)
        least = sum(prompt + sum(answers) for prompt, answers in drawn)
        assert len(rows) <= math.ceil(least / max_tokens) + 1
        densities.append(sum(num_row_tokens(row, lengths) for row in rows) / (len(rows) * max_tokens))
    assert sum(densities) / len(densities) >= mean_density


@pytest.mark.parametrize(
    ("max_tokens", "row_lengths", "whole", "streamed"),
    [
        (8192, 1, 0.976, 0.887),
        (8192, 8, 0.987, 0.973),
        (8192, 16, 0.988, 0.982),
        (16384, 1, 0.971, 0.761),
        (16384, 8, 0.990, 0.968),
        (16384, 16, 0.993, 0.980),
        (32768, 1, 0.956, 0.598),
        (32768, 8, 0.989, 0.942),
        (32768, 16, 0.994, 0.970),
    ],
)
def test_the_densities_that_the_docs_state(max_tokens: int, row_lengths: int, whole: float, streamed: float) -> None:
    """Mean over 20 draws of a step of 64 prompts of 8 samples, in one chunk and in as many as there can be."""
    densities = []
    for seed in range(20):
        responses = np.random.default_rng(seed).lognormal(np.log(450), 0.6, (64, 8)).clip(100, 1500).astype(int)
        drawn = list(zip(PROMPTS * 2, responses.tolist(), strict=True))
        chunks = one_by_one(drawn, max_tokens, pads_passes=row_lengths == 1)
        assert len(chunks) == 8
        densities.append([density_of(each, max_tokens, row_lengths) for each in ([drawn], chunks)])
    assert np.mean(densities, axis=0) == pytest.approx([whole, streamed], abs=6e-4)


def one_by_one(
    drawn: list[tuple[int, list[int]]], max_tokens: int, *, pads_passes: bool
) -> list[list[tuple[int, list[int]]]]:
    """The chunks of a batch whose groups arrive one by one, each later than the chunk before is computed."""
    chunks: list[list[tuple[int, list[int]]]] = [[]]
    for number, group in enumerate(drawn):
        chunks[-1].append(group)
        num_tokens = sum(len(responses) * prompt + sum(responses) for prompt, responses in chunks[-1])
        num_missing = len(drawn) - number - 1 + len(chunks[-1])
        is_due = is_chunk(
            len(chunks[-1]),
            num_tokens,
            num_missing=num_missing,
            groups_per_step=len(drawn),
            pass_tokens=max_tokens,
            pads_passes=pads_passes,
        )
        if is_due and number < len(drawn) - 1:
            chunks.append([])
    return chunks


def density_of(chunks: list[list[tuple[int, list[int]]]], max_tokens: int, row_lengths: int) -> float:
    """Share of the padded rows' tokens that belong to samples."""
    read = computed = 0
    for chunk in chunks:
        lengths, groups, prefixes = flat(chunk)
        sizes = [num_row_tokens(row, lengths) for row in plan_rows(lengths, groups, prefixes, max_tokens, fill=True)]
        read += sum(sizes)
        computed += sum(padded_length(size, fixed_length(size, max_tokens, row_lengths)) for size in sizes)
    return read / computed


def test_a_fixed_row_has_the_least_length_that_holds_it() -> None:
    """Of four even steps; a sample that is longer than all of them is a row of its own length."""
    found = [fixed_length(size, 1000, 4) for size in (1, 250, 251, 1000, 1200)]
    assert found == [250, 250, 500, 1000, 1000]
    assert fixed_length(1, 1000, 1) == 1000
    assert fixed_length(999, 1000, 3) == 1000  # three steps of 334 are more than the longest


def test_sharing_prompts_saves_what_it_should_on_geo3k_lengths() -> None:
    """Rows of any length hold each prompt once; filling rows of a fixed length costs a few copies."""
    lengths, groups, prefixes = flat(GEO3K_GROUPS)
    least = sum(prompt + sum(responses) for prompt, responses in GEO3K_GROUPS)
    free = sum(num_row_tokens(row, lengths) for row in plan_rows(lengths, groups, prefixes, 8192))
    filled = sum(num_row_tokens(row, lengths) for row in plan_rows(lengths, groups, prefixes, 8192, fill=True))
    assert free == least
    assert least < filled < 1.03 * least
    assert sum(lengths) > 1.2 * least


def read(reader: GroupReader, model_path: Path, *, images: int = 1, **changes: Sequence[int]) -> list[TrainSequence]:
    """Four samples of one prompt, with pictures of 9 placeholders each."""
    pictures = [picture(number) for number in range(images)]
    group = make_group(model_path, images=pictures, placeholders=[9] * images, **changes)
    return list(reader.read(group, IMAGES).sequences)


def with_ids(sequence: TrainSequence, ids: Sequence[int], *, own: Sequence[int]) -> TrainSequence:
    """A text sample of these ids, of which those at `own` are the policy's."""
    mask = np.isin(np.arange(len(ids)), own)
    return replace(
        sequence,
        token_ids_X=np.array(ids),
        loss_mask_X=mask,
        engine_logprobs_X=np.where(mask, -1.5, 0).astype(np.float32),
        versions_X=np.where(mask, 3, -1),
        image_mask_X=np.zeros(len(ids), dtype=bool),
        images=(),
    )


def test_the_common_prefix_is_what_all_samples_begin_with(reader: GroupReader, tiny_model_path: Path) -> None:
    """Prompt and pictures, and own tokens as far as all answers begin alike; never an answer's last token."""
    sequences = read(reader, tiny_model_path)
    prompt = BOILERPLATE + 9 + 1 + 7
    assert [int(np.flatnonzero(s.loss_mask_X)[0]) for s in sequences] == [prompt] * 4
    assert common_prefix_length(sequences) == prompt
    first = sequences[0]
    answers = [with_ids(first, ids, own=range(2, len(ids))) for ids in ([1, 2, 5, 6, 7], [1, 2, 5, 6, 8], [1, 2, 5, 9])]
    assert common_prefix_length(answers) == 3
    assert common_prefix_length(answers[:2]) == 4
    assert common_prefix_length([answers[0], answers[0]]) == 4
    assert common_prefix_length([answers[0], with_ids(first, [1, 2, 5], own=[2])]) == 2


def test_a_prefix_ends_before_a_picture_that_differs(reader: GroupReader, tiny_model_path: Path) -> None:
    """The placeholders of two pictures of one size are equal tokens; what they stand for is not."""
    one, other = read(reader, tiny_model_path, images=2)[:2]
    assert common_prefix_length([one, other]) == BOILERPLATE + 9 + 1 + 9 + 1 + 7
    assert common_prefix_length([one, replace(other, images=other.images[::-1])]) == BOILERPLATE
    last_differs = replace(other, images=(other.images[0], replace(other.images[1])))
    assert common_prefix_length([one, last_differs]) == BOILERPLATE + 9 + 1


def test_a_row_has_the_prompt_once_and_each_own_token_at_its_place(reader: GroupReader, tiny_model_path: Path) -> None:
    """Ids, positions, predicting rows and per-token values are those of the samples."""
    sequences = read(reader, tiny_model_path, images=2)
    prefix = common_prefix_length(sequences)
    row = build_row(
        sequences, (Block(sequences=(2, 0, 1), prefix_length=prefix), Block(sequences=(3,), prefix_length=0))
    )
    lengths = [s.num_inputs for s in sequences]
    assert row.num_tokens == prefix + sum(lengths[number] - prefix for number in (2, 0, 1)) + lengths[3]
    assert [(s.stop - s.start, s.prefix_stop - s.prefix_start) for s in row.segments] == [
        (prefix, 0),
        *((lengths[number] - prefix, prefix) for number in (2, 0, 1) if lengths[number] > prefix),
        (lengths[3], 0),
    ]
    assert row.image_numbers_I == (0, 1, 0, 1)
    assert row.pixel_values_PD is not None
    assert len(row.pixel_values_PD) == 72
    for number, sequence in enumerate(sequences):
        mine = row.sample_N == number
        own = np.flatnonzero(sequence.loss_mask_X)
        assert row.targets_N[mine].tolist() == sequence.token_ids_X[own].tolist()
        assert row.engine_logprobs_N[mine].tolist() == sequence.engine_logprobs_X[own].tolist()
        assert row.versions_N[mine].tolist() == sequence.versions_X[own].tolist()
        read_from = row.predict_N[mine]
        assert row.input_ids_T[read_from].tolist() == sequence.token_ids_X[own - 1].tolist()
        positions = sample_positions(sequence.image_mask_X, [image.grid_thw for image in sequence.images], [9, 9])
        assert row.positions_AT[:, read_from].tolist() == positions[:, own - 1].tolist()
    firsts = [int(row.predict_N[row.sample_N == number][0]) for number in (0, 1, 2)]
    assert firsts == [prefix - 1] * 3


def test_answers_that_begin_alike_share_rows_of_their_own_tokens(reader: GroupReader, tiny_model_path: Path) -> None:
    """By hand: prompt 1 2; answers 5 6 7, 5 6 8 and 5 6. Token 6 is predicted three times from one row."""
    first = read(reader, tiny_model_path)[0]
    samples = [with_ids(first, ids, own=range(2, len(ids))) for ids in ([1, 2, 5, 6, 7], [1, 2, 5, 6, 8], [1, 2, 5, 6])]
    prefix = common_prefix_length(samples)
    row = build_row(samples, (Block(sequences=(0, 1, 2), prefix_length=prefix),))
    assert row.input_ids_T.tolist() == [1, 2, 5, 6, 6]
    assert row.targets_N.tolist() == [5, 6, 7, 5, 6, 8, 5, 6]
    assert row.predict_N.tolist() == [1, 2, 3, 1, 2, 4, 1, 2]
    assert row.positions_AT[0].tolist() == [0, 1, 2, 3, 3]


def test_padding_is_a_segment_of_its_own(reader: GroupReader, tiny_model_path: Path) -> None:
    """Up to the length, then to a multiple of 64; a row that is longer is padded to a multiple only."""
    sequences = read(reader, tiny_model_path)
    block = Block(sequences=(0,), prefix_length=0)
    for length, expected in ((100, 128), (10, 64)):
        row = build_row(sequences, (block,), length=length)
        assert len(row.input_ids_T) == row.positions_AT.shape[1] == expected
        assert row.num_tokens == sequences[0].num_inputs
        assert row.segments[-1].start == sequences[0].num_inputs
        assert row.positions_AT[:, row.num_tokens].tolist() == [0] * 4
        assert image_token_id(tiny_model_path) not in row.input_ids_T[row.num_tokens :]
        assert int(row.predict_N.max()) < row.num_tokens


def test_a_step_without_samples_shares_nothing() -> None:
    """Its metrics do not say that all was saved."""
    assert TokenCounts().shared_fraction == 0.0
