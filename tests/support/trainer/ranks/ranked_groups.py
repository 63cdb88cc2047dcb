"""Groups for steps that are compared between one rank and many."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.model.families.experts import MixtureShape, mixture_shape
from penstock.model.tokens import image_token_id
from services.trainer.batching.images import ImagePatcher
from services.trainer.batching.sequences import TrainGroup, open_reader
from tests.support.trainer.groups import IMAGES, make_group, picture

VERSION = 3


def groups_of(path: Path, *, seed: int = 0) -> list[TrainGroup]:
    """Three with a signal and two of equal rewards, of several versions and sizes.

    The first has a picture if the model takes any. Of a mixture it is known which experts computed some of the tokens.
    """
    reader, mixture = open_reader(path), mixture_shape(path)
    patcher = None if image_token_id(path) is None else ImagePatcher(path)
    rewards = [(1.0, 0.0, 0.0, 1.0), (0.0, 0.0, 1.0, 0.5), (0.0, 1.0, 0.0), (0.9,) * 4, (0.3,) * 4]
    made = []
    for index, version in enumerate((1, 2, 3, 3, 2)):
        shown: dict[str, Any] = {}
        if index == 0 and patcher is not None:
            image = picture(index + seed)
            shown = {"images": [image], "placeholders": [patcher(image).num_placeholders]}
        group = make_group(path, index=index, rewards=rewards[index], version=version, seed=seed, **shown)
        made.append(reader.read(group, IMAGES))
    made[1] = replace(made[1], masked=(False, False, False, True))
    if mixture is not None:
        rng = np.random.default_rng(seed)
        made = [with_random_experts(group, mixture, rng) for group in made]
    return made


def with_random_experts(group: TrainGroup, mixture: MixtureShape, rng: np.random.Generator) -> TrainGroup:
    """The group with experts that no router chose: of all tokens, of the first few of them, and of none."""
    samples = []
    for number, sample in enumerate(group.samples):
        sequences = []
        for sequence in sample:
            size = (len(sequence) - 1 - 9 * (number % 2), mixture.num_layers, mixture.num_experts)
            drawn = rng.random(size).argsort(axis=-1)[..., : mixture.num_experts_per_token].astype(np.uint8)
            sequences.append(sequence if number == 2 else replace(sequence, routed_experts_RLK=drawn))
        samples.append(tuple(sequences))
    return replace(group, samples=tuple(samples))
