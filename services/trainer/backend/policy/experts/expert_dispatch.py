"""Sends tokens to the ranks that own their experts, and the experts' outputs back.

Each rank has a row of its own, and O of a layer's E experts. Every token goes to each of its K experts by one exchange,
sorted by expert, and comes back by another; its own rank weighs and sums what came back, in the order in which
transformers does it on one rank. No token is dropped, whatever the routers choose; a rank whose experts nobody chose
computes a row of zeros, so that all ranks go forward and back through the same exchanges.

Legend: T = tokens of this rank's row, H = hidden size, E = experts of a layer, O = those of them that a rank owns,
K = experts of a token, S = T * K tokens sent, R = tokens received, W = ranks that exchange tokens.
"""

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist

from services.trainer.backend.policy.exchange import Exchange
from services.trainer.backend.policy.experts.mixture import autocast_dtype, experts_of
from services.trainer.backend.ranks.expert_groups import ExpertGroups


def divide_experts(policy: Any, groups: ExpertGroups) -> Iterator[Any]:
    """Leave this rank its own experts of each layer, and yield the modules that hold them.

    Args:
        policy: A `PolicyModel` on one device, the same on every rank.
        groups: Their size divides the number of experts.
    """
    for experts in experts_of(policy.model):
        for name, parameter in list(experts.named_parameters(recurse=False)):
            own = torch.nn.Parameter(groups.own(parameter.detach()).clone(), requires_grad=parameter.requires_grad)
            setattr(experts, name, own)
        experts.num_experts //= groups.size
        experts.forward = MethodType(_dispatching(experts.forward, groups), experts)
        yield experts


def _dispatching(compute: Callable[..., torch.Tensor], groups: ExpertGroups) -> Callable[..., torch.Tensor]:
    """Return a forward method for all experts of a layer, given that of this rank's own."""

    def forward(
        experts: Any, hidden_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        hidden_TH = hidden_TH.to(autocast_dtype(hidden_TH) or hidden_TH.dtype)  # what travels is rounded before
        num_own, top_k = experts.num_experts, experts_TK.shape[-1]
        experts_S = experts_TK.reshape(-1)
        order_S = experts_S.argsort(stable=True)
        sent_WO = torch.zeros(groups.size * num_own, dtype=torch.int64, device=hidden_TH.device)
        sent_WO = sent_WO.scatter_add_(0, experts_S, torch.ones_like(experts_S)).view(groups.size, num_own)
        received_WO = torch.empty_like(sent_WO)
        dist.all_to_all_single(received_WO, sent_WO, group=groups.exchange)
        sent, received = torch.stack([sent_WO.sum(1), received_WO.sum(1)]).tolist()

        tokens_RH = Exchange.apply(hidden_TH[order_S // top_k], received, sent, groups.exchange)
        own_R = torch.arange(num_own, device=hidden_TH.device).repeat(groups.size)
        own_R = own_R.repeat_interleave(received_WO.reshape(-1), output_size=sum(received))
        outputs_RH = _computed(compute, tokens_RH, own_R)
        outputs_SH = Exchange.apply(outputs_RH, sent, received, groups.exchange)

        return weighed(outputs_SH, order_S, weights_TK).to(hidden_TH.dtype)

    return forward


def weighed(outputs_SH: torch.Tensor, order_S: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Return [T, H]: the weighted sum of each token's outputs.

    Args:
        outputs_SH: In the order in which the tokens were sent.
        order_S: Number of each output's token and expert, of T * K.
        weights_TK: Weight of each token's experts.
    """
    outputs_SH = torch.empty_like(outputs_SH).index_copy_(0, order_S, outputs_SH)
    return (outputs_SH * weights_TK.reshape(-1, 1)).view(*weights_TK.shape, -1).sum(1)


def _computed(compute: Callable[..., torch.Tensor], tokens_RH: torch.Tensor, own_R: torch.Tensor) -> torch.Tensor:
    """Return [R, H]: each token through its expert, unweighted."""
    if len(tokens_RH):
        return compute(tokens_RH, own_R[:, None], torch.ones_like(own_R[:, None], dtype=tokens_RH.dtype))
    zeros_RH = tokens_RH.sum(0, keepdim=True)  # a row of the empty tensor's: its gradient must reach the exchange
    return compute(zeros_RH, own_R.new_zeros(1, 1), tokens_RH.new_ones(1, 1))[:0]
