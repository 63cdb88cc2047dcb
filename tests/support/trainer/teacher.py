"""A teacher: a model with the sizes of another and other weights."""

import shutil
from pathlib import Path

import torch

from services.trainer.backend.policy.load_model import load_policy


def write_teacher(path: Path, folder: Path) -> Path:
    """Write a copy of a model whose weights are off by random numbers; return its folder."""
    shutil.copytree(path, folder)
    model = load_policy(path, temperature=1.0, forbidden_ids=()).model
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.05)
    model.save_pretrained(folder)
    return folder
