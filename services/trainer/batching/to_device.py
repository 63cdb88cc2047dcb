"""Copies from the host to the device that nothing waits for."""

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on `device`. A GPU gets it behind the work that is queued there, while the host goes on.

    A plain copy waits until the GPU has done all that is queued, and then the GPU waits for the host.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
