"""Log-probabilities of given tokens and entropies, in the engine's convention.

Legend: N = tokens whose log-probability is wanted, H = hidden size, V = vocabulary, W = tokens of one slice of N.

Convention: logits are divided by the temperature, forbidden ids are removed, then log_softmax in float32, before any
top-k or top-p. Logits exist at the N positions only, and in slices where N * V is large.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 2**27
"""Logits that exist at one time: half a GiB in float32. Larger batches are sliced, and each slice is computed again in
the backward pass."""


class TokenLogprobs(NamedTuple):
    """What the model says of tokens."""

    logprobs_N: torch.Tensor
    """The tempered log-probability of each token."""
    entropy_N: torch.Tensor
    """Entropy of the distribution that each token is from, in nats. It has a gradient."""


def token_logprobs(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden_NH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float,
    forbidden_ids: torch.Tensor,
) -> TokenLogprobs:
    """Return the log-probability of each target and the entropy where it stands, in float32.

    Args:
        head: Hidden states [W, H] to logits [W, V].
        hidden_NH: The hidden state from which each target is predicted.
        targets_N: int64 token ids.
        vocab_size: V.
        temperature: Divides the logits.
        forbidden_ids: int64 ids that the policy can never sample.
    """

    def of_slice(hidden_WH: torch.Tensor, targets_W: torch.Tensor) -> TokenLogprobs:
        logits_WV = head(hidden_WH).float() / temperature
        logits_WV = logits_WV.index_fill(1, forbidden_ids, float("-inf"))
        lse_W = logits_WV.logsumexp(dim=1)
        logprobs_W = logits_WV.gather(1, targets_W[:, None]).squeeze(1) - lse_W
        finite_WV = logits_WV.index_fill(1, forbidden_ids, 0.0)
        entropy_W = lse_W - (logits_WV.softmax(dim=1) * finite_WV).sum(dim=1)
        return TokenLogprobs(logprobs_W, entropy_W)

    width = max(1, MAX_LOGITS // vocab_size)
    if len(targets_N) <= width:
        return of_slice(hidden_NH, targets_N)
    slices = zip(hidden_NH.split(width), targets_N.split(width), strict=True)
    parts = [checkpoint(of_slice, *one, use_reentrant=False) for one in slices]
    return TokenLogprobs(*(torch.cat(each) for each in zip(*parts, strict=True)))
