"""Groups as a worker would publish them, made without an engine: for tests of what the trainer does with them."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from penstock.bus.image_store import hash_of
from penstock.model.tokens import image_token_id
from penstock.records import Group, GroupId, Sample, TokenSequence, Verdict, VersionSpan

BOILERPLATE = 20
"""Tokens of text before a made-up prompt's first image."""

BETWEEN = 17
"""The token after each image."""


def picture(seed: int, *, size: tuple[int, int] = (96, 96), mode: str = "RGB") -> bytes:
    """A PNG of random rectangles."""
    rng = np.random.default_rng(seed)
    image = Image.new("RGB", size, "white")
    canvas = ImageDraw.Draw(image)
    for _ in range(4):
        x, y = int(rng.integers(0, size[0] - 10)), int(rng.integers(0, size[1] - 10))
        canvas.rectangle((x, y, x + 9, y + 9), fill=tuple(int(c) for c in rng.integers(0, 256, 3)))
    out = io.BytesIO()
    image.convert(mode).save(out, "PNG")
    return out.getvalue()


def num_placeholders(size: tuple[int, int]) -> int:
    """Placeholders of an image whose sides are multiples of 32 and need no scaling, in the tiny model."""
    return size[0] // 32 * (size[1] // 32)


IMAGES: dict[str, bytes] = {}
"""Every image that a group made here shows, by its hash."""


def remember(data: bytes) -> str:
    """Keep an image in `IMAGES` and return its hash."""
    IMAGES[hash_of(data)] = data
    return hash_of(data)


def make_group(
    model_path: Path,
    *,
    index: int = 0,
    attempt: int = 0,
    rewards: Sequence[float] = (1.0, 0.0, 0.0, 1.0),
    version: int = 1,
    images: Sequence[bytes] = (),
    placeholders: Sequence[int] = (),
    own_lengths: Sequence[int] | None = None,
    seed: int = 0,
) -> Group:
    """A group of single-turn samples: a prompt of random text, its images, and random tokens of the policy's own.

    Args:
        model_path: For the image placeholder's id.
        index: Of the group.
        attempt: Of the group.
        rewards: One per sample.
        version: That produced every token.
        images: Of the prompt.
        placeholders: How many placeholders each of them becomes.
        own_lengths: The policy's own tokens in each sample; else 3, 4, 5, ...
        seed: Of everything random.
    """
    rng = np.random.default_rng((seed, index))
    image_id = image_token_id(model_path)
    prompt_ids = [*rng.integers(0, 256, BOILERPLATE), *[image_id, BETWEEN] * len(images), *rng.integers(0, 256, 7)]
    lengths = own_lengths or [3 + number for number in range(len(rewards))]
    samples = []
    for reward, length in zip(rewards, lengths, strict=True):
        own = rng.integers(0, 256, length)
        mask = np.array([False] * len(prompt_ids) + [True] * length)
        logprobs = np.where(mask, -rng.random(len(mask)) * 6, 0).astype(np.float32)
        sequence = TokenSequence(
            token_ids=np.array([*prompt_ids, *own], dtype=np.int32),
            loss_mask=mask,
            logprobs=logprobs,
            version_spans=(VersionSpan(num_tokens=length, policy_version=version),),
            images=tuple(map(remember, images)),
            num_prompt_tokens=len(prompt_ids) - len(images) + sum(placeholders),
            num_last_turn_tokens=length,
        )
        samples.append(
            Sample(
                sequences=(sequence,),
                reward=reward,
                finish_reason="stop",
                verdict=Verdict(score=reward, status="OK", extracted="", method="test"),
                turns=(),
                text="",
            )
        )
    group_id = GroupId(run_id="run", index=index, attempt=attempt, trainer_epoch="a")
    return Group(id=group_id, num_samples=len(samples), samples=tuple(samples), worker_id="test")
