"""Groups to sequences to micro-batches: every token where the engine had it, and an error where it was elsewhere."""

import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from penstock.errors import InvalidRequestError
from penstock.model.images import decode_image
from penstock.model.tokens import forbidden_token_ids, image_token_id, vocab_size
from penstock.records import Group, TokenSequence, VersionSpan
from services.trainer.batching.sequences import GroupReader
from tests.support.trainer.groups import BETWEEN, IMAGES, make_group, num_placeholders, picture, remember
from tests.support.trainer.read_groups import reader_of
from tests.support.trainer.rows import row_of


@pytest.fixture(scope="module")
def reader(tiny_model_path: Path) -> GroupReader:
    """For the tiny model."""
    return reader_of(tiny_model_path, forbidden_ids=forbidden_token_ids(tiny_model_path))


def with_sample(group: Group, **changes: Any) -> Group:
    """The group with its first sample's sequence changed."""
    [sequence] = group.samples[0].sequences
    first = msgspec.structs.replace(group.samples[0], sequences=(msgspec.structs.replace(sequence, **changes),))
    return msgspec.structs.replace(group, samples=(first, *group.samples[1:]))


def test_expands_each_placeholder_and_moves_everything_with_it(reader: GroupReader, tiny_model_path: Path) -> None:
    """A 96 x 96 image becomes 9 placeholders, a 64 x 160 one 10; mask, logprobs and versions stay on their tokens."""
    sizes = [(96, 96), (160, 64)]
    group = make_group(
        tiny_model_path,
        images=[picture(i, size=size) for i, size in enumerate(sizes)],
        placeholders=[num_placeholders(size) for size in sizes],
        version=4,
    )
    read = reader.read(group, IMAGES)
    for sample, sequence in zip(group.samples, read.sequences, strict=True):
        [played] = sample.sequences
        ids = played.token_ids.tolist()
        image_id = image_token_id(tiny_model_path)
        at = ids.index(image_id)
        expected = ids[:at] + [image_id] * 9 + [BETWEEN] + [image_id] * 10 + ids[at + 3 :]
        assert sequence.token_ids_X.tolist() == expected
        assert sequence.image_mask_X.sum() == 19
        own = sequence.loss_mask_X
        assert sequence.token_ids_X[own].tolist() == played.token_ids[played.loss_mask].tolist()
        assert sequence.engine_logprobs_X[own].tolist() == played.logprobs[played.loss_mask].tolist()
        assert set(sequence.versions_X[own]) == {4}
        assert set(sequence.versions_X[~own]) == {-1}
        assert [image.grid_thw for image in sequence.images] == [(1, 6, 6), (1, 4, 10)]
    assert (read.index, read.oldest_version, read.rewards) == (0, 4, (1.0, 0.0, 0.0, 1.0))


def test_matches_the_models_own_processor(tiny_model_path: Path, reader: GroupReader) -> None:
    """Ids, pixels and grid are what transformers' processor makes of the same text and image."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(tiny_model_path)
    data = picture(3, size=(300, 170))
    text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Find x.<|im_end|>\n<|im_start|>assistant\n"
    theirs = processor(text=[text], images=[decode_image(data)], return_tensors="pt")
    collapsed = processor.tokenizer(text).input_ids
    own = processor.tokenizer("3").input_ids
    group = make_group(tiny_model_path, rewards=(1.0,), images=[data], placeholders=[0])
    mask = np.array([False] * len(collapsed) + [True] * len(own))
    group = with_sample(
        group,
        token_ids=np.array(collapsed + own, np.int32),
        loss_mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        version_spans=(VersionSpan(num_tokens=len(own), policy_version=1),),
        num_prompt_tokens=theirs["input_ids"].shape[1],
        num_last_turn_tokens=len(own),
    )
    sequence = reader.read(group, IMAGES).sequences[0]
    assert sequence.token_ids_X.tolist() == theirs["input_ids"][0].tolist() + own
    torch.testing.assert_close(sequence.images[0].pixel_values_PD, theirs["pixel_values"], rtol=0, atol=0)
    assert list(sequence.images[0].grid_thw) == theirs["image_grid_thw"][0].tolist()


def test_equal_images_of_a_group_are_cut_once(tiny_model_path: Path, reader: GroupReader) -> None:
    """All samples share the very object, and a row holds its pixels once."""
    group = make_group(tiny_model_path, images=[picture(0), picture(0)], placeholders=[9, 9])
    sequences = reader.read(group, IMAGES).sequences
    assert len({id(image) for sequence in sequences for image in sequence.images}) == 1
    row = row_of(*sequences)
    assert row.pixel_values_PD is not None
    assert row.pixel_values_PD.shape[0] == 36
    assert row.image_numbers_I == (0,) * 8


@pytest.mark.parametrize("mode", ["P", "RGBA", "LA", "L", "RGB"])
def test_decodes_as_the_engine_does(mode: str) -> None:
    """`.convert("RGB")` and nothing more: alpha is dropped, not blended."""
    data = picture(1, mode=mode)
    image = Image.open(io.BytesIO(data))
    assert np.array_equal(np.asarray(decode_image(data)), np.asarray(image.convert("RGB")))
    transparent = io.BytesIO()
    Image.new("RGBA", (4, 4), (200, 100, 50, 0)).save(transparent, "PNG")
    assert decode_image(transparent.getvalue()).getpixel((0, 0)) == (200, 100, 50)


def test_last_turns_prompt_is_checked_over_several_turns(tiny_model_path: Path, reader: GroupReader) -> None:
    """Two turns with an observation between them: the count is that of everything before the last turn."""
    ids = np.arange(12, dtype=np.int32)
    mask = np.array([0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0], bool)
    changes: dict[str, Any] = {
        "token_ids": ids,
        "loss_mask": mask,
        "logprobs": np.zeros(12, np.float32),
        "version_spans": (VersionSpan(num_tokens=2, policy_version=1), VersionSpan(num_tokens=3, policy_version=2)),
        "num_last_turn_tokens": 3,
    }
    group = make_group(tiny_model_path)
    sequence = reader.read(with_sample(group, num_prompt_tokens=7, **changes), IMAGES).sequences[0]
    assert sequence.versions_X.tolist() == [-1, -1, -1, 1, 1, -1, -1, 2, 2, 2, -1, -1]
    with pytest.raises(InvalidRequestError, match="engine counted 3 prompt tokens in the last turn, the trainer 7"):
        reader.read(with_sample(group, num_prompt_tokens=3, **changes), IMAGES)


def own_token(sequence: TokenSequence, token_id: int) -> np.ndarray:
    """The sequence's ids with the first of the policy's own replaced."""
    ids = sequence.token_ids.copy()
    ids[np.flatnonzero(sequence.loss_mask)[0]] = token_id
    return ids


def test_refuses_a_prompt_that_the_engine_saw_differently(tiny_model_path: Path, reader: GroupReader) -> None:
    """The engine saw one placeholder, the trainer nine: the image never reached the encoder."""
    group = make_group(tiny_model_path, images=[picture(0)], placeholders=[1], index=5)
    message = r"group run/5, sample 0: the engine counted 29 prompt tokens .*the trainer 37.*must have seen every image"
    with pytest.raises(InvalidRequestError, match=message):
        reader.read(group, IMAGES)


def test_refuses_more_or_fewer_placeholders_than_images(tiny_model_path: Path, reader: GroupReader) -> None:
    """With the numbers."""
    group = make_group(tiny_model_path, images=[picture(0)], placeholders=[9])
    with pytest.raises(InvalidRequestError, match="1 image placeholders, but 2 images"):
        reader.read(with_sample(group, images=(remember(picture(0)), remember(picture(1)))), IMAGES)


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>"])
def test_refuses_vision_tokens_that_the_policy_sampled(tiny_model_path: Path, reader: GroupReader, token: str) -> None:
    """The engine must mask them; here is where it would show."""
    from transformers import AutoTokenizer

    token_id = AutoTokenizer.from_pretrained(tiny_model_path).convert_tokens_to_ids(token)
    group = make_group(tiny_model_path)
    group = with_sample(group, token_ids=own_token(group.samples[0].sequences[0], token_id))
    with pytest.raises(
        InvalidRequestError, match=rf"sample 0: the policy sampled the forbidden token ids \[{token_id}\]"
    ):
        reader.read(group, IMAGES)


def test_refuses_what_no_model_can_read(tiny_model_path: Path, reader: GroupReader) -> None:
    """Ids outside the vocabulary, samples without a prompt, failed groups, bytes that are no image."""
    group = make_group(tiny_model_path)
    for token_id in (-1, vocab_size(tiny_model_path)):
        with pytest.raises(InvalidRequestError, match=f"token id {token_id} is outside the vocabulary of 384"):
            reader.read(with_sample(group, token_ids=own_token(group.samples[0].sequences[0], token_id)), IMAGES)
    pair = make_group(tiny_model_path, images=[picture(0)] * 2, placeholders=[9, 9])
    ids = pair.samples[0].sequences[0].token_ids.copy()
    at = ids.tolist().index(BETWEEN)
    ids[at], ids[at + 1] = ids[at + 1], ids[at]
    with pytest.raises(InvalidRequestError, match="stand side by side"):
        reader.read(with_sample(pair, token_ids=ids), IMAGES)
    length = len(group.samples[0].sequences[0].token_ids)
    spans = (VersionSpan(num_tokens=length, policy_version=1),)
    with pytest.raises(InvalidRequestError, match="no prompt"):
        reader.read(with_sample(group, loss_mask=np.ones(length, bool), version_spans=spans), IMAGES)
    with pytest.raises(ValueError, match="reward = nan must be a finite number"):
        make_group(tiny_model_path, rewards=[1.0, float("nan")])
    with pytest.raises(InvalidRequestError, match=r"sample 0: its image [0-9a-f]{64} is missing"):
        reader.read(pair, {})
    with pytest.raises(InvalidRequestError, match=r"group run/0 failed .* because"):
        reader.read(msgspec.structs.replace(group, samples=(), error="because"), IMAGES)
    with pytest.raises(InvalidRequestError, match=r"sample 0: image \(3 bytes\) cannot be decoded"):
        reader.read(make_group(tiny_model_path, images=[b"abc"], placeholders=[9]), IMAGES)


def test_reward_of_a_response_that_was_not_judged_is_no_zero(tiny_model_path: Path, reader: GroupReader) -> None:
    """A verifier that ran into its limit says nothing about the answer."""
    group = make_group(tiny_model_path, rewards=(1.0, 0.0))
    late = msgspec.structs.replace(group.samples[1], reward=None)
    first, second = reader.read(msgspec.structs.replace(group, samples=(group.samples[0], late)), IMAGES).rewards
    assert first == 1.0
    assert np.isnan(second)
