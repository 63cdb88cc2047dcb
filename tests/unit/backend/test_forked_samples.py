"""Samples of several sequences: trained as one sample, so that a conversation that forks buys no weight."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.records import Group, TokenSequence, VersionSpan
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.base import take_step
from services.trainer.backend.batch import make_batch
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.batching.packing import plan_rows
from services.trainer.batching.sequences import TrainGroup
from services.trainer.config import OptimizerConfig, TrainerConfig
from tests.support.trainer.groups import IMAGES, make_group, picture
from tests.support.trainer.read_groups import reader_of

ALGORITHMS: dict[str, dict[str, Any]] = {
    "token": {},
    "sequence": {"aggregation": {"kind": "sequence"}},
    "prompt": {"aggregation": {"kind": "prompt"}},
    "constant": {"aggregation": {"kind": "constant", "length": 50}},
    "gspo": {"preset": "gspo"},
    "k1_in_reward": {
        "preset": "ppo",
        "advantage": {"kind": "reinforce_pp"},
        "kl": {"kind": "k1_in_reward", "coef": 0.1},
    },
    "m2po": {"preset": "m2po", "rejection": {"max_m2": 9.0}},
    "whitened": {"advantage": {"norm": "batch"}},
}


def cut_in_two(sequence: TokenSequence, num_first: int) -> tuple[TokenSequence, ...]:
    """The same answer as two calls, as a session without merging would give it: one that trains its first tokens, and
    one that has those as context and trains the others."""
    own = np.flatnonzero(sequence.loss_mask)
    split, version = int(own[num_first]), sequence.version_spans[0].policy_version
    first = msgspec.structs.replace(
        sequence,
        token_ids=sequence.token_ids[:split],
        loss_mask=sequence.loss_mask[:split],
        logprobs=sequence.logprobs[:split],
        version_spans=(VersionSpan(num_tokens=num_first, policy_version=version),),
        num_last_turn_tokens=num_first,
    )
    num_rest = len(own) - num_first
    rest = np.arange(len(sequence.token_ids)) >= split
    second = msgspec.structs.replace(
        sequence,
        loss_mask=rest,
        logprobs=np.where(rest, sequence.logprobs, np.float32(0)),
        version_spans=(VersionSpan(num_tokens=num_rest, policy_version=version),),
        num_prompt_tokens=sequence.num_prompt_tokens + num_first,
        num_last_turn_tokens=num_rest,
    )
    return first, second


def forked(group: Group) -> Group:
    """The group with every second sample cut in two."""
    samples = [
        msgspec.structs.replace(sample, sequences=cut_in_two(sample.sequences[0], 1 + number)) if number % 2 else sample
        for number, sample in enumerate(group.samples)
    ]
    return msgspec.structs.replace(group, samples=tuple(samples))


@pytest.fixture(scope="module")
def played(tiny_model_path: Path) -> list[Group]:
    """Two groups with a picture each."""
    return [
        make_group(tiny_model_path, index=index, rewards=rewards, images=[picture(index)], placeholders=[9])
        for index, rewards in enumerate([(1.0, 0.0, 0.0, 1.0), (0.0, 0.5, 1.0, 0.0)])
    ]


def stepped(
    path: Path, groups: list[TrainGroup], algorithm: dict[str, Any], **changes: Any
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics of one step, and the weights after it."""
    config = TrainerConfig(**{"device": "cpu", "optimizer": OptimizerConfig(learning_rate=1e-3), **changes})
    axes = AlgorithmConfig.model_validate(algorithm)
    backend = InProcessBackend(path, config, axes, seed=0, temperature=1.0, adam_eps=1e-3)
    backend.load(None)
    metrics = take_step(backend, [groups], 1)
    return metrics, {name: weight.clone() for name, weight in backend.export()}


def test_a_reader_keeps_the_sequences_of_a_sample_together(tiny_model_path: Path, played: list[Group]) -> None:
    """One reward each, however many sequences."""
    group = forked(played[0])
    read = reader_of(tiny_model_path).read(group, IMAGES)
    assert [len(sample) for sample in read.samples] == [1, 2, 1, 2]
    assert read.rewards == (1.0, 0.0, 0.0, 1.0)
    assert sum(each.num_own_tokens for each in read.sequences) == group.num_own_tokens == played[0].num_own_tokens


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_sample_in_pieces_is_trained_as_the_whole_one(tiny_model_path: Path, played: list[Group], name: str) -> None:
    """The same tokens behind the same context: same loss, gradient, weights and counts, however samples are cut."""
    reader = reader_of(tiny_model_path)
    whole = stepped(tiny_model_path, [reader.read(group, IMAGES) for group in played], ALGORITHMS[name])
    pieces = [reader.read(forked(group), IMAGES) for group in played]
    for changes in ({}, {"micro_batch_tokens": 60}, {"share_prompts": False, "micro_batch_tokens": 60}):
        metrics, weights = stepped(tiny_model_path, pieces, ALGORITHMS[name], **changes)
        for metric in ("loss", "num_tokens", "num_samples", "sample_tokens_mean", "reward_mean"):
            assert metrics[metric] == pytest.approx(whole[0][metric], abs=1e-6), metric
        assert metrics["grad_norm"] == pytest.approx(whole[0]["grad_norm"], rel=1e-4)
        assert max(float((weights[each] - whole[1][each]).abs().max()) for each in weights) < 1e-6


@pytest.mark.parametrize("kind", ["token", "sequence", "prompt", "constant"])
def test_a_fork_that_only_repeats_context_buys_no_weight(tiny_model_path: Path, played: list[Group], kind: str) -> None:
    """Denominators count samples and tokens: advantages and weights are those of the samples in one piece."""
    reader, length = reader_of(tiny_model_path), {"length": 50} if kind == "constant" else {}
    axes = AlgorithmConfig.model_validate({"aggregation": {"kind": kind, **length}})
    found = [
        make_batch([reader.read(group, IMAGES) for group in groups], (), algorithm=axes, entropy_coef=0.0,
                   version=1, device=torch.device("cpu"))
        for groups in (played, [forked(group) for group in played])
    ]  # fmt: skip
    one, other = found
    assert one.denominator == other.denominator
    assert torch.equal(one.samples.weights_G, other.samples.weights_G)
    assert torch.equal(one.samples.advantages_G, other.samples.advantages_G)
    assert other.sample_S.tolist() == [0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7]
    assert other.with_gradient == one.with_gradient


def test_a_sample_that_is_filtered_goes_with_all_its_sequences(tiny_model_path: Path, played: list[Group]) -> None:
    """Those that stay keep theirs."""
    read = reader_of(tiny_model_path).read(forked(played[0]), IMAGES)
    left = replace(read, samples=read.samples[1:3], rewards=read.rewards[1:3])
    assert [len(sample) for sample in left.samples] == [2, 1]
    assert len(left.sequences) == 3


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=12), st.integers(1, 80),
       st.booleans(), st.booleans())  # fmt: skip
def test_rows_never_part_a_sample(members: list[tuple[int, int]], max_tokens: int, shares: bool, fill: bool) -> None:
    """All its sequences are in one row, in their order; sequences are packed once each."""
    samples = sorted(sample for sample, _ in members)
    lengths = [length for _, length in members]
    groups = [sample // 2 for sample in samples]
    shortest = {group: min(length for length, each in zip(lengths, groups, strict=True) if each == group)
                for group in groups}  # fmt: skip
    prefixes = [shortest[group] // 2 if shares else 0 for group in groups]
    rows = plan_rows(lengths, groups, prefixes, max_tokens, fill=fill, samples=samples)
    places = {number: (row, place) for row, blocks in enumerate(rows)
              for place, number in enumerate(each for block in blocks for each in block.sequences)}  # fmt: skip
    assert sorted(places) == list(range(len(lengths)))
    for sample in set(samples):
        numbers = [number for number, each in enumerate(samples) if each == sample]
        assert len({places[number][0] for number in numbers}) == 1
        assert [places[number][1] for number in numbers] == sorted(places[number][1] for number in numbers)
