"""Configuration of kept episodes: section `[episodes]` of a recipe."""

from typing import Literal

import pydantic

from penstock.config import Config


class EpisodesConfig(Config):
    """Episodes that are kept in the run folder, with every token, for `penstock view`."""

    keep: Literal["all", "few", "off"] = "few"
    """few: of each step the best, oldest and most diverged group, the one with the worst sample, one that was cut off
    or failed, one in turn, and the first two of each kind that were left out; of each evaluation set the same eight
    rows every time, two wrong ones, and two that were cut off or failed. A token of the policy's own takes about 50
    bytes."""
    max_gib: float = pydantic.Field(default=8.0, gt=0)
    """Size of the folder `episodes`, with pictures and index; above it, the oldest steps' groups are deleted."""
