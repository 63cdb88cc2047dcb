"""An all-to-all exchange of tensors' rows that gradients pass in the other direction."""

from typing import Any

import torch
import torch.distributed as dist


class Exchange(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """Sends a part of a tensor's rows to each rank of a group, and returns what they have sent, in their order."""

    @staticmethod
    def forward(
        context: Any, rows: torch.Tensor, num_received: list[int], num_sent: list[int], group: Any
    ) -> torch.Tensor:
        """Exchange the rows."""
        context.num_received, context.num_sent, context.group = num_received, num_sent, group
        return _exchange(rows, num_received, num_sent, group)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Return their gradients the way they came."""
        return _exchange(gradient, context.num_sent, context.num_received, context.group), None, None, None


def _exchange(rows: torch.Tensor, num_received: list[int], num_sent: list[int], group: Any) -> torch.Tensor:
    received = rows.new_empty(sum(num_received), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), num_received, num_sent, group=group)
    return received
