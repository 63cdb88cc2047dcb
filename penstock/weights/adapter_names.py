"""Names of the two tensors of an adapter, `<layer>.lora_A.weight` and `<layer>.lora_B.weight`; needs no torch."""

from typing import Final

LORA_A: Final = ".lora_A.weight"
LORA_B: Final = ".lora_B.weight"


def is_adapter(name: str) -> bool:
    """Return whether a tensor of this name belongs to an adapter."""
    return name.endswith((LORA_A, LORA_B))
