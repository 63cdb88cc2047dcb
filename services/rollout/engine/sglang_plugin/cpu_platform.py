"""The platform on which SGLang runs without a GPU: plain PyTorch, without SGLang's own kernels.

SGLang finds `activate` through the entry-point group `sglang.srt.platforms`. With CUDA it returns None.
"""

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """A CPU that runs every model on its native PyTorch path."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """Return the name of attention in plain PyTorch."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Return the key that sends layers down their native path."""
        return "native"


def activate() -> str | None:
    """Return the name of the platform's class, or None where CUDA is available."""
    return None if torch.cuda.is_available() else f"{__name__}.{CpuPlatform.__name__}"
