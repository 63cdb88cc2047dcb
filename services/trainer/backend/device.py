"""Resolves the device and the precision that the policy computes in."""

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


def resolve_dtype(
    dtype: Literal["auto", "float32", "bfloat16"], device: Literal["cpu", "cuda"]
) -> Literal["float32", "bfloat16"]:
    """Return the configured dtype; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    if dtype == "auto":
        return "bfloat16" if device == "cuda" else "float32"
    return dtype
