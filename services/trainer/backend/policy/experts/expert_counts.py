"""Counts which experts a mixture's routers choose.

Only the hidden states that predict the policy's own tokens are counted, each once for every token that it predicts. So
counts do not depend on how samples are packed into rows, how often a shared prompt is computed, or on padding.

Legend: T = tokens of a row, N = own tokens, K = experts of a token, L = layers with experts, E = experts of a layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from services.trainer.backend.policy.experts.mixture import routers_of


class _Watch(NamedTuple):
    """A forward pass that is counted."""

    predict_N: torch.Tensor
    counts_E: list[torch.Tensor]
    """Of each layer so far."""


class ExpertCounter:
    """Watches the routers of a model in chosen forward passes, and not when activations are computed again."""

    def __init__(self, model: Any) -> None:
        """Watch the routers of a transformers model; a dense one has none."""
        self._watch: _Watch | None = None
        for router in routers_of(model):
            router.register_forward_hook(self._count)

    @contextmanager
    def counting(self, predict_N: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Fill a list with int64[E] for each layer that is computed in this context: choices of each expert.

        Args:
            predict_N: The row's tokens that are counted, with repetitions.
        """
        self._watch = _Watch(predict_N, [])
        try:
            yield self._watch.counts_E
        finally:
            self._watch = None

    def _count(self, router: Any, _: Any, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        if self._watch is None:
            return
        _, _, experts_TK = output
        chosen = experts_TK[self._watch.predict_N].reshape(-1)
        counts_E = chosen.new_zeros(router.num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
        self._watch.counts_E.append(counts_E)
