"""The device that the policy computes on, its peak, and torch's names of the precisions."""

from typing import Literal

import torch

from penstock.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PEAK_TFLOPS = {
    "NVIDIA B200": 2250.0,
    "NVIDIA H200": 989.0,
    "NVIDIA H200 NVL": 835.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA L40": 181.0,
    "NVIDIA L4": 121.0,
    "NVIDIA A40": 149.7,
    "NVIDIA A30": 165.0,
    "NVIDIA A10": 125.0,
}
"""bfloat16 without sparsity, in 10^12 operations per second, from NVIDIA's data sheets, by the driver's whole name: a
longer one is another GPU, or a slice of one."""


def resolve_device(device: str) -> Literal["cpu", "cuda"]:
    """Return the configured device; `auto` is a GPU if there is one.

    Raises:
        ConfigError: cuda is configured, but there is no GPU.
    """
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError("trainer.device is cuda, but torch finds no GPU; set it to auto or cpu")
    return "cuda" if has_cuda and device != "cpu" else "cpu"


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return what a device can do in a precision, in 10^12 operations per second; None if it is not known."""
    if device.type != "cuda" or dtype is not torch.bfloat16:
        return None
    return PEAK_TFLOPS.get(torch.cuda.get_device_name(device))
