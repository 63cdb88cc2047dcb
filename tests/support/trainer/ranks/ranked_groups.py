"""Groups for steps that are compared between one rank and many."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.model.tokens import image_token_id
from services.trainer.batching.images import ImagePatcher
from services.trainer.batching.sequences import TrainGroup, open_reader
from tests.support.trainer.groups import IMAGES, make_group, picture

VERSION = 3


def groups_of(path: Path, *, seed: int = 0) -> list[TrainGroup]:
    """Three with a signal and two of equal rewards, of several versions and sizes.

    The first has a picture if the model takes any.
    """
    reader = open_reader(path)
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
    return made
