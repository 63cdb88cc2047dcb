"""Which experts compute a sample's tokens: recorded as an engine does, and faults in it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from services.trainer.backend.policy.experts.mixture import routers_of
from services.trainer.backend.policy.model import PolicyModel
from services.trainer.batching.sequences import TrainSequence
from tests.support.trainer.rows import row_of


@torch.no_grad()
def chosen_experts(policy: PolicyModel, row: Any) -> np.ndarray:
    """uint8[T, L, K]: what the routers give a row's tokens."""
    chosen: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda *args: chosen.append(args[-1][2])) for router in routers_of(policy.model)
    ]
    policy(row)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).numpy().astype(np.uint8)


def recorded(policy: PolicyModel, sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """The sequences with the experts that this model's routers choose, each computed alone."""
    return [replace(each, routed_experts_RLK=chosen_experts(policy, row_of(each))) for each in sequences]


def exchanged(sequences: Sequence[TrainSequence], num_experts: int) -> list[TrainSequence]:
    """The sequences as if each expert's number were the next one's."""
    made = []
    for each in sequences:
        assert each.routed_experts_RLK is not None
        made.append(replace(each, routed_experts_RLK=(each.routed_experts_RLK + 1) % num_experts))
    return made


@torch.no_grad()
def disturb_routers(policy: PolicyModel, size: float) -> None:
    """Change every router's scores a little, as rounding does: nearly equal ones then choose other experts."""
    generator = torch.Generator().manual_seed(3)
    for router in routers_of(policy.model):
        noise = torch.randn(router.weight.shape, generator=generator)
        router.weight.add_(size * router.weight.std() * noise)
