"""Chooses the memory that receives a bucket: its parameter's, or a buffer."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from penstock.weights.manifest import TensorSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Destination:
    """Memory that receives the weights of a push."""

    held: Mapping[str, torch.Tensor]
    """Parameters to write into, by checkpoint name; empty if SGLang's own loader takes the tensors."""
    device: torch.device
    holds_all: bool = False
    """Whether these are all parameters, so that blocks of a delta can be applied to them."""

    def of_bucket(self, bucket: Sequence[TensorSpec]) -> tuple[torch.Tensor, bool]:
        """Return memory for a bucket, uint8[bytes], and whether it belongs to the bucket's only parameter.

        A bucket with one tensor is received in place, without a copy.
        """
        tensor = self.held.get(bucket[0].name) if len(bucket) == 1 else None
        if tensor is not None and tensor.is_contiguous() and tensor.numel():
            return tensor.view(-1).view(torch.uint8), True
        size_bytes = sum(spec.num_bytes for spec in bucket)
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device), False
