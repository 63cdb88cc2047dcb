"""Packed rows and group rows: logprobs and gradients of one sample at a time, for each family; and tests that can fail.

The models are confident: the entropy of what they say is below half of ln V, so that a token at a wrong place shows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import varlen as torch_varlen

from bench.trainer.padded import PaddedPolicy
from penstock.model.families.qwen_vl import TRAINED_MODEL_TYPES
from penstock.model.tokens import forbidden_token_ids, image_token_id
from services.trainer.backend.policy import varlen
from services.trainer.backend.policy.model import PolicyModel
from services.trainer.batching.images import ImagePatcher
from services.trainer.batching.packing import common_prefix_length
from services.trainer.batching.rows import PackedRow, Segment
from services.trainer.batching.sequences import TrainSequence
from tests.support.trainer import varlen_on_cpu
from tests.support.trainer.families import CHECKPOINT, FAMILIES, VOCABULARY, write_processors
from tests.support.trainer.groups import picture
from tests.support.trainer.rows import group_row, row_of

TEMPERATURE = 0.7


def sharpened(model: Any) -> Any:
    """Random weights at a scale where every layer is heard, and logits that spread by some four nats."""
    generator = torch.Generator().manual_seed(0)
    head = model.get_output_embeddings().weight
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            std = 1.0 if "embed_tokens" in name else parameter[0].numel() ** -0.5
            if ".experts." in name:
                std = parameter.shape[-1] ** -0.5
            if parameter is head:
                std = 4 * TEMPERATURE * parameter.shape[1] ** -0.5
            parameter.data.normal_(std=std, generator=generator)
    return model


assert set(FAMILIES) == set(TRAINED_MODEL_TYPES), "a type without these tests must be refused"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Two of one size, one of another, in the patches of each family."""
    sizes = [(96, 96), (96, 96), (160, 128)]
    patchers = {family: ImagePatcher(write_processors(family, tmp_path_factory.mktemp(family))) for family in FAMILIES}
    return {
        family: [patcher(picture(seed, size=size)) for seed, size in enumerate(sizes)]
        for family, patcher in patchers.items()
    }


def sample(prompt: Sequence[Any], *turns: Sequence[Any]) -> TrainSequence:
    """A sample of ids and images: a prompt, then turns of the policy and observations by turns."""
    image_id = image_token_id(CHECKPOINT)
    ids: list[int] = []
    own: list[bool] = []
    shown = []
    for number, part in enumerate([prompt, *turns]):
        for item in part:
            if isinstance(item, int):
                expanded = [item]
            else:
                shown.append(item)
                expanded = [image_id] * item.num_placeholders
            ids += expanded
            own += [number % 2 == 1] * len(expanded)
    mask = np.array(own)
    return TrainSequence(
        token_ids_X=np.array(ids),
        loss_mask_X=mask,
        engine_logprobs_X=np.zeros(len(ids), dtype=np.float32),
        versions_X=np.where(mask, 1, -1),
        image_mask_X=np.array(ids) == image_id,
        images=tuple(shown),
    )


def words(seed: int, count: int) -> list[int]:
    """Plain tokens."""
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Of the model."""
    return str(request.param)


def policies(family: str, *, checkpointing: bool = False) -> tuple[PolicyModel, PaddedPolicy]:
    """Ours, and the reference with the same weights."""
    forbidden = forbidden_token_ids(CHECKPOINT)
    ours, theirs = sharpened(FAMILIES[family]()), sharpened(FAMILIES[family]())
    theirs.load_state_dict(ours.state_dict())
    policy = PolicyModel(ours, temperature=TEMPERATURE, forbidden_ids=forbidden, gradient_checkpointing=checkpointing)
    return policy, PaddedPolicy(theirs, temperature=TEMPERATURE, forbidden_ids=forbidden)


def groups_for(family: str, images: dict[str, list[Any]]) -> list[list[TrainSequence]]:
    """Groups with a picture, with none, with two and an answer that begins like another, and of several turns."""
    square, other, wide = images[family]
    if family in ("qwen2", "qwen3", "qwen3_moe", "qwen3_5_text"):
        square = other = wide = 17
    prompt = [*words(0, 12), square, *words(1, 9)]
    two = [*words(2, 5), square, 17, wide, *words(3, 4)]
    text = words(4, 20)
    begin = words(5, 4)
    turns = [*words(6, 5), other, *words(7, 6)]
    return [
        [sample(prompt, words(seed, 5 + seed)) for seed in (10, 11, 12)],
        [sample(text, words(seed, 3 + seed)) for seed in (1, 20, 2)],
        [sample(two, begin + words(8, 6)), sample(two, begin + words(9, 2)), sample(two, begin)],
        [
            sample(turns, begin, [*words(20, 3), square, *words(21, 3)], words(22, 7)),
            sample(turns, begin, [*words(20, 3), square, *words(21, 3)], words(23, 3)),
            sample(turns, begin, [*words(20, 3), wide, *words(21, 3)], words(24, 4)),
        ],
    ]


def in_order(row: PackedRow, values_N: torch.Tensor, samples: Sequence[int]) -> torch.Tensor:
    """Values of a row, sample by sample."""
    return torch.cat([values_N[row.sample_N == number] for number in samples])


@torch.no_grad()
def test_packed_rows_give_the_logprobs_of_one_by_one_and_of_padded_rows(
    family: str, images: dict[str, list[Any]]
) -> None:
    """Text and pictures mixed in one row, nothing shared."""
    policy, reference = policies(family)
    sequences = [sequence for group in groups_for(family, images) for sequence in group]
    padded = reference.logprobs(sequences)
    one_by_one = torch.cat([policy(row_of(sequence)).logprobs_N for sequence in sequences])
    packed = policy(row_of(*sequences)).logprobs_N
    torch.testing.assert_close(one_by_one, padded, rtol=0, atol=1e-5)
    torch.testing.assert_close(packed, padded, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_gpus_attention_gives_the_same(
    family: str, images: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call for all segments, images and windows, with what the host derives from the images' sizes."""
    policy, _ = policies(family)
    sequences = [sequence for group in groups_for(family, images) for sequence in group]
    row = row_of(*sequences)
    plainly = policy(row).logprobs_N
    monkeypatch.setattr(varlen, "is_usable_for", lambda _: True)
    monkeypatch.setattr(torch_varlen, "varlen_attn", varlen_on_cpu.varlen_attn)
    torch.testing.assert_close(policy(row).logprobs_N, plainly, rtol=0, atol=3e-5)


@torch.no_grad()
def test_the_models_are_confident(family: str, images: dict[str, list[Any]]) -> None:
    """Else the tests of faults below could not feel one: at chance, every token says the same."""
    policy, _ = policies(family)
    for group in groups_for(family, images):
        assert float(policy(row_of(*group)).entropy_N.mean()) < math.log(VOCABULARY) / 2


@pytest.mark.parametrize("checkpointing", [False, True])
def test_group_rows_equal_unshared_rows_in_loss_and_every_gradient(
    family: str, images: dict[str, list[Any]], checkpointing: bool
) -> None:
    """Against the padded reference, to 1e-5 of each parameter's gradient norm, the tower's included.

    The loss takes each logprob with a weight of its own, and the entropy of each.
    """
    policy, reference = policies(family, checkpointing=checkpointing)
    for group in groups_for(family, images):
        weights = torch.linspace(-1, 2, sum(sequence.num_own_tokens for sequence in group))
        shared, unshared = group_row(*group), row_of(*group)
        assert shared.num_tokens < unshared.num_tokens
        losses, gradients = [], []
        for row in (shared, unshared):
            policy.zero_grad()
            output = policy(row)
            loss = (weights * output.logprobs_N).sum() + 0.1 * output.entropy_N.sum()
            loss.backward()
            losses.append(float(loss.detach()))
            gradients.append({name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None})
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        require_equal_gradients(gradients[0], gradients[1])

        policy.zero_grad()
        (weights * policy(shared).logprobs_N).sum().backward()
        ours = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
        reference.model.zero_grad()
        (weights * reference.logprobs(group)).sum().backward()
        require_equal_gradients(
            ours, {name: p.grad for name, p in reference.model.named_parameters() if p.grad is not None}
        )


def require_equal_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Each parameter by itself: a wrong one must not hide behind the norm of the others."""
    assert ours.keys() == theirs.keys()
    largest = max(float(gradient.norm()) for gradient in theirs.values())
    for name, gradient in theirs.items():
        error = float((ours[name] - gradient).norm())
        # A key's bias shifts all scores alike: its gradient is zero but for rounding.
        assert error <= 1e-5 * float(gradient.norm()) + 1e-8 * largest, name


@torch.no_grad()
def test_rows_of_a_fixed_length_change_nothing(family: str, images: dict[str, list[Any]]) -> None:
    """The padding is a segment that nobody sees."""
    from services.trainer.batching.packing import Block
    from services.trainer.batching.rows import build_row

    policy, _ = policies(family)
    group = groups_for(family, images)[0]
    blocks = (Block(sequences=(0, 1, 2), prefix_length=common_prefix_length(group)),)
    padded, plain = build_row(group, blocks, length=200), build_row(group, blocks)
    assert padded.num_padded > 0
    torch.testing.assert_close(policy(padded).logprobs_N, policy(plain).logprobs_N, rtol=0, atol=1e-5)


def shifted(row: PackedRow) -> PackedRow:
    """Every response begins one position later."""
    positions = row.positions_AT.clone()
    for segment in row.segments:
        if segment.prefix_stop > segment.prefix_start:
            positions[:, segment.start : segment.stop] += 1
    return replace(row, positions_AT=positions)


def swapped(row: PackedRow) -> PackedRow:
    """The two different pictures of a row at each other's place."""
    assert row.grid_thw_U3 is not None
    assert row.grid_thw_U3[0].tolist() == row.grid_thw_U3[1].tolist()
    return replace(row, image_numbers_I=tuple(1 - number for number in row.image_numbers_I))


def moved_boundary(row: PackedRow) -> PackedRow:
    """A segment's last token belongs to the next one: a response's, or a whole sample's if nothing is shared."""
    is_shared = any(segment.prefix_stop for segment in row.segments)
    first, second = next(
        (one, two)
        for one, two in pairwise(row.segments)
        if one.stop - one.start > 1 and (not is_shared or (one.prefix_stop and two.prefix_stop))
    )
    changed = [replace(first, stop=first.stop - 1), replace(second, start=second.start - 1)]
    return replace(
        row, segments=tuple(dict(zip([first, second], changed, strict=True)).get(s, s) for s in row.segments)
    )


def forgotten_prefix(row: PackedRow) -> PackedRow:
    """Responses that do not see their prompt."""
    return replace(row, segments=tuple(Segment(start=s.start, stop=s.stop) for s in row.segments))


def read_too_late(row: PackedRow) -> PackedRow:
    """The first token of a response is read from the response's first row instead of the prompt's last."""
    prompt_end = row.segments[0].stop - 1
    predict = row.predict_N.clone()
    for segment in row.segments[1:]:
        place = (predict == segment.start).nonzero()[0, 0] - 1
        assert predict[place] == prompt_end
        predict[place] = segment.start
    return replace(row, predict_N=predict)


def text_axes_only(row: PackedRow) -> PackedRow:
    """Image tokens counted like text."""
    return replace(row, positions_AT=row.positions_AT[:1].expand(4, -1))


FAULTS = [shifted, moved_boundary, forgotten_prefix, read_too_late]
FAULTS_OF_IMAGES = [swapped, text_axes_only]
WITH_IMAGES = ["qwen3_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl_moe"]
OF_TEXT = ["qwen3", "qwen3_moe"]


def confident_samples(name: str, images: dict[str, list[Any]]) -> list[TrainSequence]:
    """Three answers to one prompt, with two pictures if the family has any."""
    shown = images[name] if name in WITH_IMAGES else [17, 17]
    prompt = [*words(0, 6), shown[0], *words(1, 3), shown[1], *words(2, 6)]
    return [sample(prompt, words(seed, 8)) for seed in (10, 11, 12)]


def felt(name: str, row: PackedRow, fault: Callable[[PackedRow], PackedRow]) -> float:
    """The largest change of a logprob in a row about which the model is confident."""
    policy, _ = policies(name)
    right = policy(row)
    assert float(right.entropy_N.mean()) < math.log(VOCABULARY) / 2
    return float((policy(fault(row)).logprobs_N - right.logprobs_N).abs().max())


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *((name, fault) for name in [*WITH_IMAGES, *OF_TEXT] for fault in FAULTS),
        *((name, fault) for name in WITH_IMAGES for fault in FAULTS_OF_IMAGES),
    ],
    ids=lambda part: part if isinstance(part, str) else part.__name__,
)
def test_a_fault_is_felt(name: str, fault: Callable[[PackedRow], PackedRow], images: dict[str, list[Any]]) -> None:
    """By more than 1e-2 in some logprob: a thousand times what the tests above allow."""
    assert felt(name, group_row(*confident_samples(name, images)), fault) > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("name", [*WITH_IMAGES, *OF_TEXT])
def test_a_moved_boundary_of_unshared_rows_is_felt(name: str, images: dict[str, list[Any]]) -> None:
    """As much: a sample that begins one token early, or ends one early."""
    assert felt(name, row_of(*confident_samples(name, images)), moved_boundary) > 1e-2
