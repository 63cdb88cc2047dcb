"""Plans packed rows: which sequences share a row, and which of them share a prompt.

Sequences of a group begin with the same prompt. A *block* holds the group's common prefix once, then the rest of each
sequence; a *row* is a list of blocks. A plan consists of numbers only; nothing here uses tensors.

Invariants: every sequence is in exactly one block; all sequences of a sample are in one row, in order, because ratios
and rejections may be per sample; a row has at most `max_tokens` tokens unless one sample alone has more; the same
lengths give the same plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from services.trainer.batching.sequences import TrainSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Sequences of one group in one row."""

    sequences: tuple[int, ...]
    """Numbers of the sequences."""
    prefix_length: int
    """Leading tokens that all sequences share and that the row holds once; 0 if nothing is shared."""


Row = tuple[Block, ...]


@dataclass(slots=True)
class _OpenRow:
    """A row that is being filled."""

    members: dict[int, list[int]] = field(default_factory=dict)
    """Sequences by group."""
    num_tokens: int = 0


def common_prefix_length(sequences: Sequence[TrainSequence]) -> int:
    """Return the number of leading tokens that all sequences share, images included.

    The prefix never ends inside an image. It can reach into the policy's own tokens if the answers begin alike: each
    sequence then reads its own log-probabilities from the shared rows.
    """
    first = sequences[0]
    shared = min(sequence.num_inputs for sequence in sequences)
    for other in sequences[1:]:
        differs = np.flatnonzero(first.token_ids_X[:shared] != other.token_ids_X[:shared])
        shared = int(differs[0]) if len(differs) else shared
        for start, mine, others in zip(first.image_starts, first.images, other.images, strict=False):
            if start < shared and mine is not others:  # the placeholders are equal, but their images differ
                shared = start
    return shared


def pack(
    sequences: Sequence[TrainSequence],
    groups: Sequence[int],
    chosen: Sequence[int],
    *,
    max_tokens: int,
    share_prompts: bool,
    fill: bool = False,
    samples: Sequence[int] | None = None,
) -> list[Row]:
    """Plan rows of the chosen sequences.

    Args:
        sequences: All sequences of the optimizer batch.
        groups: Group of each sequence.
        chosen: Numbers of the sequences to pack.
        max_tokens: Most tokens of a row; a longer sample gets its own row.
        share_prompts: Let sequences of a group share their common prefix.
        fill: As in `plan_rows`.
        samples: Sample of each sequence; None: each sequence is a sample.
    """
    members: dict[int, list[int]] = {}
    for number in chosen:
        members.setdefault(groups[number], []).append(number)
    prefixes = {
        group: common_prefix_length([sequences[number] for number in numbers]) if share_prompts else 0
        for group, numbers in members.items()
    }
    plan = plan_rows(
        [sequences[number].num_inputs for number in chosen],
        [groups[number] for number in chosen],
        [prefixes[groups[number]] for number in chosen],
        max_tokens,
        fill=fill,
        samples=None if samples is None else [samples[number] for number in chosen],
    )
    return [
        tuple(replace(block, sequences=tuple(chosen[index] for index in block.sequences)) for block in row)
        for row in plan
    ]


def num_row_tokens(row: Row, lengths: Sequence[int]) -> int:
    """Return the tokens of a row, given the input tokens of every sequence."""
    return sum(
        block.prefix_length + sum(lengths[number] - block.prefix_length for number in block.sequences) for block in row
    )


def plan_rows(
    lengths: Sequence[int],
    groups: Sequence[int],
    prefix_lengths: Sequence[int],
    max_tokens: int,
    *,
    fill: bool = False,
    samples: Sequence[int] | None = None,
) -> list[Row]:
    """Pack sequences into rows by first-fit decreasing, the sample with the longest sequence first.

    A group whose block fits into a row is never cut, because a cut costs a second copy of its prefix. A larger group
    fills rows of its own, and its rest is combined with others.

    Args:
        lengths: Input tokens of each sequence, its prefix included.
        groups: Group of each sequence.
        prefix_lengths: Tokens that each sequence shares with all others of its group; 0 shares nothing.
        max_tokens: Most tokens of a row. A longer sample gets its own row.
        fill: Cut groups wherever that fills a row. Use it if rows are padded to `max_tokens`, where an empty place
            costs as much as a second copy.
        samples: Sample of each sequence; None: each sequence is a sample.
    """
    samples = range(len(lengths)) if samples is None else samples
    longest: dict[int, int] = {}
    for sample, length in zip(samples, lengths, strict=True):
        longest[sample] = max(length, longest.get(sample, 0))
    by_group: dict[int, list[int]] = {}
    for number in sorted(range(len(lengths)), key=lambda number: (-longest[samples[number]], samples[number], number)):
        # Samples that share nothing are groups of one.
        by_group.setdefault(groups[number] if prefix_lengths[number] else -1 - samples[number], []).append(number)
    items: list[list[int]] = []
    for members in sorted(by_group.values(), key=lambda members: (-_size(members, lengths, prefix_lengths), members)):
        is_kept_whole = not fill and _size(members, lengths, prefix_lengths) <= max_tokens
        items += [members] if is_kept_whole else [list(each) for _, each in groupby(members, key=samples.__getitem__)]

    rows: list[_OpenRow] = []
    for item in items:
        group = groups[item[0]]
        alone = _size(item, lengths, prefix_lengths)
        beside = alone - prefix_lengths[item[0]]  # where the row holds the prefix already
        for row in [*(row for row in rows if group in row.members), *rows]:  # rows of its own group first
            cost = beside if group in row.members else alone
            if row.num_tokens + cost <= max_tokens:
                break
        else:
            row, cost = _OpenRow(), alone
            rows.append(row)
        row.members.setdefault(group, []).extend(item)
        row.num_tokens += cost
    return [_closed(row, prefix_lengths) for row in rows]


def _size(members: Sequence[int], lengths: Sequence[int], prefix_lengths: Sequence[int]) -> int:
    """Return the tokens of a block."""
    prefix = prefix_lengths[members[0]]
    return prefix + sum(lengths[number] - prefix for number in members)


def _closed(row: _OpenRow, prefix_lengths: Sequence[int]) -> Row:
    blocks = []
    for members in row.members.values():
        prefix = prefix_lengths[members[0]]
        if prefix and len(members) > 1:
            blocks.append(Block(sequences=tuple(members), prefix_length=prefix))
        else:
            blocks += [Block(sequences=(number,), prefix_length=0) for number in members]
    return tuple(blocks)
