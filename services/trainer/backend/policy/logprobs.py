"""Log-probabilities of given tokens and entropies, in the engine's convention, without holding all logits at once.

Legend: N = tokens whose log-probability is wanted, H = hidden size, V = vocabulary, C = tokens of one chunk, K = ids of
one chunk, L = layers with experts, E = experts of a layer.

Convention: logits are divided by the temperature, forbidden ids are removed, then log_softmax in float32, before any
top-k or top-p.

Logits exist in chunks of tokens and ids. The forward pass keeps a running log-sum-exp (Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax"); the backward pass recomputes each chunk. With l the tempered logits,
p = softmax(l), e = the sampled token and H = lse - sum p l:

    d logp / d l = 1[e] - p        d H / d l = -p (l - sum p l)

A batch whose logits are one chunk keeps them for the backward pass.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

CHUNK_TOKENS = 2048
CHUNK_IDS = 16384
"""Logits that exist at a time: 128 MiB in float32, and as much again for each of two intermediate results."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities of tokens, entropies, and what a mixture chose for them."""

    logprobs_N: torch.Tensor
    """The tempered log-probability of each token."""
    entropy_N: torch.Tensor
    """Entropy of the distribution that each token was drawn from, in nats, with gradient."""
    expert_counts_LE: torch.Tensor | None = None
    """int64: how many of the tokens chose each expert (`expert_counts`); None for a dense model."""


def token_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float,
    forbidden_ids: torch.Tensor,
    bias_V: torch.Tensor | None = None,
    float32_head: bool = False,
) -> TokenLogprobs:
    """Return the log-probability of each target and the entropy at its place, in float32 or wider.

    Inputs are rounded to autocast's precision, if it is on, as in the engine; the products are computed in that
    precision, or in float32.

    Args:
        hidden_NH: The hidden state that predicts each target.
        weight_VH: The output embedding.
        targets_N: int64 token ids.
        temperature: Divides the logits.
        forbidden_ids: int64 ids that the policy can never sample.
        bias_V: Bias of the output embedding, if it has one.
        float32_head: Compute the products in float32, as SGLang does with `enable_fp32_lm_head`.
    """
    device = hidden_NH.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VH.dtype
    forbidden_V = torch.zeros(len(weight_VH), dtype=torch.bool, device=hidden_NH.device)
    forbidden_V[forbidden_ids] = True
    hidden_NH, weight_VH = hidden_NH.to(dtype), weight_VH.to(dtype)
    if float32_head:
        hidden_NH, weight_VH = hidden_NH.to(_wide(dtype)), weight_VH.to(_wide(dtype))
    with torch.autocast(device, enabled=False):
        outputs = _TokenLogprobs.apply(hidden_NH, weight_VH, bias_V, targets_N, forbidden_V, temperature)
    return TokenLogprobs(*outputs)


class _Head(NamedTuple):
    """Computes tempered logits of chunks."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None
    forbidden_V: torch.Tensor
    temperature: float

    def chunks(self) -> Iterator[slice]:
        """Yield the ranges of ids."""
        for start in range(0, len(self.weight_VH), CHUNK_IDS):
            yield slice(start, min(start + CHUNK_IDS, len(self.weight_VH)))

    def logits(self, hidden_CH: torch.Tensor, ids: slice) -> torch.Tensor:
        """Return [C, K] in float32 or wider."""
        logits_CK = (hidden_CH @ self.weight_VH[ids].T).to(_wide(hidden_CH.dtype))
        if self.bias_V is not None:
            logits_CK += self.bias_V[ids]
        return logits_CK.div_(self.temperature).masked_fill_(self.forbidden_V[ids], -torch.inf)


class _TokenLogprobs(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """Log-probabilities and entropies, with logits recomputed for the gradient."""

    @staticmethod
    def forward(
        context: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        forbidden_V: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = _Head(weight_VH, bias_V, forbidden_V, temperature)
        wide = _wide(hidden_NH.dtype)
        num_tokens = len(hidden_NH)
        largest_N = torch.full((num_tokens,), -torch.inf, dtype=wide, device=hidden_NH.device)
        sum_N, weighted_N, target_N = (torch.zeros_like(largest_N) for _ in range(3))
        is_whole = num_tokens <= CHUNK_TOKENS and len(weight_VH) <= CHUNK_IDS
        logits_CK = None
        for tokens in _slices(num_tokens):
            for ids in head.chunks():
                logits_CK = head.logits(hidden_NH[tokens], ids)
                _gather_targets(target_N[tokens], logits_CK, targets_N[tokens], ids)
                _accumulate(largest_N[tokens], sum_N[tokens], weighted_N[tokens], logits_CK)
        lse_N = largest_N + sum_N.log()
        mean_N = weighted_N / sum_N
        context.save_for_backward(
            hidden_NH, weight_VH, bias_V, targets_N, forbidden_V, lse_N, mean_N, logits_CK if is_whole else None
        )
        context.temperature = temperature
        context.set_materialize_grads(False)
        return target_N - lse_N, lse_N - mean_N

    @staticmethod
    def backward(
        context: Any, grad_logprobs_N: torch.Tensor | None, grad_entropies_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if grad_logprobs_N is None and grad_entropies_N is None:
            return (None,) * 6
        hidden_NH, weight_VH, bias_V, targets_N, forbidden_V, lse_N, mean_N, kept = context.saved_tensors
        head = _Head(weight_VH, bias_V, forbidden_V, context.temperature)
        needs_weight, needs_bias = context.needs_input_grad[1:3]
        grad_hidden_NH = torch.zeros(hidden_NH.shape, dtype=lse_N.dtype, device=hidden_NH.device)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=lse_N.dtype) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=lse_N.dtype) if needs_bias else None
        for tokens in _slices(len(hidden_NH)):
            for ids in head.chunks():
                logits_CK = kept if kept is not None else head.logits(hidden_NH[tokens], ids)
                grad_CK = (logits_CK - lse_N[tokens, None]).exp_()  # p
                factor: torch.Tensor | float = 0.0
                if grad_entropies_N is not None:
                    factor = (mean_N[tokens, None] - logits_CK).masked_fill_(forbidden_V[ids], 0)
                    factor *= grad_entropies_N[tokens, None]
                if grad_logprobs_N is not None:
                    factor = factor - grad_logprobs_N[tokens, None]
                grad_CK *= factor
                if grad_logprobs_N is not None:
                    _add_at_targets(grad_CK, grad_logprobs_N[tokens], targets_N[tokens], ids)
                grad_CK /= context.temperature
                narrow_CK = grad_CK.to(hidden_NH.dtype)
                grad_hidden_NH[tokens] += narrow_CK @ weight_VH[ids]
                if grad_weight_VH is not None:
                    grad_weight_VH[ids] += narrow_CK.T @ hidden_NH[tokens]
                if grad_bias_V is not None:
                    grad_bias_V[ids] += grad_CK.sum(0)
        wanted = ((grad_hidden_NH, hidden_NH), (grad_weight_VH, weight_VH), (grad_bias_V, bias_V))
        return *(None if grad is None else grad.to(like.dtype) for grad, like in wanted), None, None, None


def _accumulate(
    largest_C: torch.Tensor, sum_C: torch.Tensor, weighted_C: torch.Tensor, logits_CK: torch.Tensor
) -> None:
    """Add a chunk to the running largest logit, sum of exp(l - largest) and sum of l exp(l - largest)."""
    before_C = largest_C.clone()
    torch.maximum(largest_C, logits_CK.amax(1), out=largest_C)
    # A chunk of only forbidden ids has no largest logit.
    shift_C = torch.where(largest_C.isinf(), 0, largest_C)
    scale_C = (before_C - shift_C).exp()
    exp_CK = (logits_CK - shift_C[:, None]).exp_()
    sum_C.mul_(scale_C).add_(exp_CK.sum(1))
    weighted_C.mul_(scale_C).add_(exp_CK.mul_(logits_CK.clamp(min=torch.finfo(logits_CK.dtype).min)).sum(1))


def _in_chunk(targets_C: torch.Tensor, ids: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which targets are in the chunk, and their columns; 0 for those that are not."""
    columns_C = targets_C - ids.start
    is_in_C = (columns_C >= 0) & (columns_C < ids.stop - ids.start)
    return is_in_C, torch.where(is_in_C, columns_C, 0)


def _gather_targets(target_C: torch.Tensor, logits_CK: torch.Tensor, targets_C: torch.Tensor, ids: slice) -> None:
    """Write the logits of the targets that are in the chunk."""
    is_in_C, columns_C = _in_chunk(targets_C, ids)
    found_C = logits_CK.gather(1, columns_C[:, None]).squeeze(1)
    target_C.copy_(torch.where(is_in_C, found_C, target_C))


def _add_at_targets(grad_CK: torch.Tensor, grad_C: torch.Tensor, targets_C: torch.Tensor, ids: slice) -> None:
    """Add each token's gradient at its target, if the target is in the chunk."""
    is_in_C, columns_C = _in_chunk(targets_C, ids)
    grad_CK.scatter_add_(1, columns_C[:, None], torch.where(is_in_C, grad_C, 0)[:, None])


def _slices(num_tokens: int) -> Iterator[slice]:
    for start in range(0, num_tokens, CHUNK_TOKENS):
        yield slice(start, min(start + CHUNK_TOKENS, num_tokens))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the precision of sums."""
    return torch.promote_types(dtype, torch.float32)
