"""Compiles the policy's layers, and what follows the head's products, with torch.compile.

On a GPU a step of a small model takes longer between the products than in them: norms, rotations and activations are
many small kernels, each of which reads and writes all of a row. Compiled, the kernels between two products are one. A
layer of the text, or a block of the tower, is compiled once and serves all of them and rows of every length; attention
is an operation in it, so the host starts a layer in one piece.

Sums are rounded in another order than without compilation, so results differ by rounding errors.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

from penstock.model.families.linear_attention import attends_linearly
from services.trainer.backend.policy.experts.mixture import experts_of
from services.trainer.checks.compiled import require_compilable

BACKEND = "inductor"
"""torch's own compiler."""


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of tensors as kernels that serve all sizes."""
    fused: Callable[..., Any] = torch.compile(function, dynamic=True, backend=BACKEND)
    return fused


def compile_layers(model: Any, layers: Iterable[torch.nn.Module]) -> None:
    """Make layers of a transformers model compute compiled from now on.

    Raises:
        ConfigError: it is a mixture of experts, or has layers of linear attention.
    """
    require_compilable(
        True,
        is_mixture=any(True for _ in experts_of(model)),
        attends_linearly=attends_linearly(model.config.model_type),
    )
    for layer in layers:
        layer.compile(dynamic=True, backend=BACKEND)
