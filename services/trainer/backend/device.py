"""The device that the policy computes on, and torch's names of the precisions."""

from typing import Literal

import torch

from penstock.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_device(device: str) -> Literal["cpu", "cuda"]:
    """Return the configured device; `auto` is a GPU if there is one.

    Raises:
        ConfigError: cuda is configured, but there is no GPU.
    """
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError("trainer.device is cuda, but torch finds no GPU; set it to auto or cpu")
    return "cuda" if has_cuda and device != "cpu" else "cpu"
