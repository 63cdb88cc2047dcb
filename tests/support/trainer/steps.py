"""A small batch, and a backend that takes optimizer steps of it."""

from pathlib import Path
from typing import Any

import torch

from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.batching.sequences import TrainGroup, open_reader
from services.trainer.config import BackendConfig, OptimizerConfig
from tests.support.trainer.groups import IMAGES, make_group, picture

VERSION = 3
"""The policy's, at the step."""


def loaded(
    path: Path, checkpoint: Path | None = None, *, micro_batch_tokens: int = 8192, **algorithm: Any
) -> InProcessBackend:
    """One that has loaded the model, or a checkpoint, and whose steps can be seen. `algorithm` is that section."""
    config = BackendConfig(
        device="cpu", micro_batch_tokens=micro_batch_tokens, optimizer=OptimizerConfig(learning_rate=1e-3)
    )
    backend = InProcessBackend(
        path, config, AlgorithmConfig.model_validate(algorithm), seed=0, temperature=1.0, max_skipped_steps=1
    )
    backend.load(checkpoint)
    return backend


def four_groups(path: Path) -> list[TrainGroup]:
    """Three with a signal and one of equal rewards, of versions 1, 2, 3, 3; the first two with a picture.

    The engine's log-probabilities are random, so the ratios to them are far from 1.
    """
    reader = open_reader(path)
    rewards = [(1.0, 0.0, 0.0, 1.0), (0.0, 0.0, 1.0, 0.5), (0.0, 1.0, 0.0, 0.0), (0.9, 0.9, 0.9, 0.9)]
    made = []
    for index, version in enumerate((1, 2, 3, 3)):
        shown: dict[str, Any] = {"images": [picture(index)], "placeholders": [9]} if index < 2 else {}
        group = make_group(path, index=index, rewards=rewards[index], version=version, **shown)
        made.append(reader.read(group, IMAGES))
    return made


def weights(backend: InProcessBackend) -> dict[str, torch.Tensor]:
    """A copy of them."""
    return {name: weight.clone() for name, weight in backend.export()}


def same_weights(one: InProcessBackend, other: dict[str, torch.Tensor]) -> bool:
    """To the bit."""
    return all(torch.equal(weight, other[name]) for name, weight in one.export())
