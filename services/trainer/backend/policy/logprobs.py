"""Log-probabilities of given tokens and entropies, in the engine's convention, without holding all logits at once.

Legend: N = tokens whose log-probability is wanted, H = hidden size, V = vocabulary, C = tokens of one chunk, K = ids of
one chunk, L = layers with experts, E = experts of a layer.

Convention: logits are divided by the temperature, forbidden ids are removed, then log_softmax in float32, before any
top-k or top-p.

Logits exist in chunks of tokens and ids. The forward pass keeps a running log-sum-exp (Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax"). The backward pass computes the products of each chunk again, or finds them
kept in half precision, like other activations. With l the tempered logits, p = softmax(l), e = the sampled token and H
= lse - sum p l:

    d logp / d l = 1[e] - p        d H / d l = -p (l - sum p l)

A batch whose logits are one chunk keeps them for the backward pass.

What follows a product is elementwise: on a GPU many kernels, each of which reads and writes logits in float32.
Compiled, they are few, and write logits only where logits are kept.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from services.trainer.backend.policy.compiled import compiled

CHUNK_TOKENS = 2048
CHUNK_IDS = 16384
"""Logits that exist at a time: 128 MiB in float32, and as much again for each of two intermediate results."""
COMPILED_CHUNK_TOKENS = 8192
"""The same compiled, where only products and their gradient are written: 256 MiB each in half precision. The head's
gradient is read and written once for each chunk."""


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
    is_compiled: bool = False,
    keeps_products: bool = False,
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
        is_compiled: Fuse what follows the products, with torch.compile.
        keeps_products: Keep products in half precision for the backward pass, V numbers for each token: it then
            multiplies as often as for any other layer, and not once more.
    """
    device = hidden_NH.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VH.dtype
    forbidden_V = torch.zeros(len(weight_VH), dtype=torch.bool, device=hidden_NH.device)
    forbidden_V.index_fill_(0, forbidden_ids, True)
    hidden_NH, weight_VH = hidden_NH.to(dtype), weight_VH.to(dtype)
    if float32_head:
        hidden_NH, weight_VH = hidden_NH.to(_wide(dtype)), weight_VH.to(_wide(dtype))
    goes_back = torch.is_grad_enabled() and (hidden_NH.requires_grad or weight_VH.requires_grad)
    settings = _Settings(
        temperature=temperature,
        is_compiled=is_compiled,
        keeps_products=keeps_products and goes_back and _wide(hidden_NH.dtype) is not hidden_NH.dtype,
    )
    with torch.autocast(device, enabled=False):
        outputs = _TokenLogprobs.apply(hidden_NH, weight_VH, bias_V, targets_N, forbidden_V, settings)
    return TokenLogprobs(*outputs)


class _Settings(NamedTuple):
    """How chunks are computed."""

    temperature: float
    is_compiled: bool
    keeps_products: bool

    def chunk_tokens(self) -> int:
        """Return the most tokens of a chunk."""
        return COMPILED_CHUNK_TOKENS if self.is_compiled else CHUNK_TOKENS


class _Tempering(NamedTuple):
    """What turns the products of a chunk into its logits."""

    bias_K: torch.Tensor | None
    forbidden_K: torch.Tensor
    temperature: float

    def logits(self, product_CK: torch.Tensor) -> torch.Tensor:
        """Return [C, K] in float32 or wider; it may lie in the product's memory."""
        logits_CK = product_CK.to(_wide(product_CK.dtype))
        if self.bias_K is not None:
            logits_CK += self.bias_K
        return logits_CK.div_(self.temperature).masked_fill_(self.forbidden_K, -torch.inf)


class _Head(NamedTuple):
    """Computes chunks."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None
    forbidden_V: torch.Tensor
    temperature: float

    def chunks(self) -> Iterator[slice]:
        """Yield the ranges of ids."""
        for start in range(0, len(self.weight_VH), CHUNK_IDS):
            yield slice(start, min(start + CHUNK_IDS, len(self.weight_VH)))

    def products(self, hidden_CH: torch.Tensor, ids: slice) -> torch.Tensor:
        """Return [C, K]."""
        return hidden_CH @ self.weight_VH[ids].T

    def tempering(self, ids: slice) -> _Tempering:
        """Return what is done with the products of a chunk."""
        return _Tempering(None if self.bias_V is None else self.bias_V[ids], self.forbidden_V[ids], self.temperature)


class _TokenLogprobs(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """Log-probabilities and entropies. For the gradient, logits are made again: of products that are kept, or computed
    again.
    """

    @staticmethod
    def forward(
        context: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        forbidden_V: torch.Tensor,
        settings: _Settings,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = _Head(weight_VH, bias_V, forbidden_V, settings.temperature)
        wide = _wide(hidden_NH.dtype)
        num_tokens, chunk_tokens = len(hidden_NH), settings.chunk_tokens()
        largest_N = torch.full((num_tokens,), -torch.inf, dtype=wide, device=hidden_NH.device)
        sum_N, weighted_N, target_N = (torch.zeros_like(largest_N) for _ in range(3))
        is_whole = num_tokens <= chunk_tokens and len(weight_VH) <= CHUNK_IDS
        read = compiled(_read) if settings.is_compiled else _read
        logits: torch.Tensor | None = None
        products: list[torch.Tensor] = []
        for tokens in _slices(num_tokens, chunk_tokens):
            for ids in head.chunks():
                product = head.products(hidden_NH[tokens], ids)
                logits = read(
                    product,
                    head.tempering(ids),
                    targets_N[tokens] - ids.start,
                    (largest_N[tokens], sum_N[tokens], weighted_N[tokens], target_N[tokens]),
                    keeps_logits=is_whole,
                )
                if settings.keeps_products and not is_whole:
                    products.append(product)
        lse_N = largest_N + sum_N.log()
        mean_N = weighted_N / sum_N
        context.save_for_backward(
            hidden_NH, weight_VH, bias_V, targets_N, forbidden_V, lse_N, mean_N, logits, *products
        )
        context.settings = settings
        context.set_materialize_grads(False)
        return target_N - lse_N, lse_N - mean_N

    @staticmethod
    def backward(
        context: Any, grad_logprobs_N: torch.Tensor | None, grad_entropies_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if grad_logprobs_N is None and grad_entropies_N is None:
            return (None,) * 6
        hidden_NH, weight_VH, bias_V, targets_N, forbidden_V, lse_N, mean_N, logits, *products = context.saved_tensors
        settings: _Settings = context.settings
        head = _Head(weight_VH, bias_V, forbidden_V, settings.temperature)
        needs_weight, needs_bias = context.needs_input_grad[1:3]
        grad_hidden_NH = torch.zeros(hidden_NH.shape, dtype=lse_N.dtype, device=hidden_NH.device)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=lse_N.dtype) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=lse_N.dtype) if needs_bias else None
        differentiate = compiled(_gradient) if settings.is_compiled else _gradient
        kept = iter(products)
        for tokens in _slices(len(hidden_NH), settings.chunk_tokens()):
            for ids in head.chunks():
                product = next(kept, None)
                if product is None and logits is None:
                    product = head.products(hidden_NH[tokens], ids)
                narrow_CK, grad_bias_K = differentiate(
                    product,
                    logits,
                    head.tempering(ids),
                    targets_N[tokens] - ids.start,
                    lse_N[tokens],
                    mean_N[tokens],
                    None if grad_logprobs_N is None else grad_logprobs_N[tokens],
                    None if grad_entropies_N is None else grad_entropies_N[tokens],
                    dtype=hidden_NH.dtype,
                    needs_bias=needs_bias,
                    is_compiled=settings.is_compiled,
                )
                grad_hidden_NH[tokens] += narrow_CK @ weight_VH[ids]
                if grad_weight_VH is not None:
                    grad_weight_VH[ids] += narrow_CK.T @ hidden_NH[tokens]
                if grad_bias_V is not None:
                    grad_bias_V[ids] += grad_bias_K
        wanted = ((grad_hidden_NH, hidden_NH), (grad_weight_VH, weight_VH), (grad_bias_V, bias_V))
        return *(None if grad is None else grad.to(like.dtype) for grad, like in wanted), None, None, None


def _read(
    product_CK: torch.Tensor,
    tempering: _Tempering,
    columns_C: torch.Tensor,
    running: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    keeps_logits: bool,
) -> torch.Tensor | None:
    """Add a chunk to the running results, and return its logits if they are kept.

    Args:
        product_CK: Hidden states times the chunk's part of the head.
        tempering: What turns them into logits.
        columns_C: Column of each token's target; it may lie outside the chunk.
        running: Of each token, the largest logit so far, the sum of exp(l - largest), that of l exp(l - largest), and
            the target's logit.
        keeps_logits: Whether the backward pass needs them.
    """
    logits_CK = tempering.logits(product_CK)
    largest_C, sum_C, weighted_C, target_C = running
    is_in_C, own_C = _in_chunk(columns_C, logits_CK)
    found_C = logits_CK.gather(1, own_C[:, None]).squeeze(1)
    target_C.copy_(torch.where(is_in_C, found_C, target_C))
    before_C = largest_C.clone()
    largest_C.copy_(torch.maximum(before_C, logits_CK.amax(1)))
    # A chunk of only forbidden ids has no largest logit.
    shift_C = torch.where(largest_C.isinf(), 0, largest_C)
    scale_C = (before_C - shift_C).exp()
    exp_CK = (logits_CK - shift_C[:, None]).exp_()
    sum_C.mul_(scale_C).add_(exp_CK.sum(1))
    weighted_C.mul_(scale_C).add_(exp_CK.mul_(logits_CK.clamp(min=torch.finfo(logits_CK.dtype).min)).sum(1))
    return logits_CK if keeps_logits else None


def _gradient(
    product_CK: torch.Tensor | None,
    kept_CK: torch.Tensor | None,
    tempering: _Tempering,
    columns_C: torch.Tensor,
    lse_C: torch.Tensor,
    mean_C: torch.Tensor,
    grad_logprobs_C: torch.Tensor | None,
    grad_entropies_C: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    needs_bias: bool,
    is_compiled: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradient of a chunk's products in `dtype`, and if needed the sum over the tokens, the bias's.

    Args:
        product_CK: Hidden states times the chunk's part of the head; None if the logits were kept.
        kept_CK: The logits, if they were kept.
        tempering: What turns products into logits.
        columns_C: Column of each token's target; it may lie outside the chunk.
        lse_C: log-sum-exp of each token's logits.
        mean_C: Mean of each token's logits, by their probabilities.
        grad_logprobs_C: Gradient of each log-probability, if they have any.
        grad_entropies_C: Gradient of each entropy, if they have any.
        dtype: Precision of products.
        needs_bias: Whether the bias is trained.
        is_compiled: Whether this is being compiled.
    """
    if kept_CK is None:
        assert product_CK is not None
        logits_CK = tempering.logits(product_CK)
    else:
        logits_CK = kept_CK
    grad_CK = (logits_CK - lse_C[:, None]).exp_()  # p
    factor: torch.Tensor | float = 0.0
    if grad_entropies_C is not None:
        factor = (mean_C[:, None] - logits_CK).masked_fill_(tempering.forbidden_K, 0)
        factor *= (grad_entropies_C / tempering.temperature)[:, None]
    if grad_logprobs_C is not None:
        grad_logprobs_C = grad_logprobs_C / tempering.temperature
        factor = factor - grad_logprobs_C[:, None]
    grad_CK *= factor
    if grad_logprobs_C is not None:
        if is_compiled:  # one kernel with the rest, which a scatter would end
            ids_K = torch.arange(grad_CK.shape[1], dtype=torch.int32, device=grad_CK.device)
            grad_CK += torch.where(ids_K == columns_C.to(torch.int32)[:, None], grad_logprobs_C[:, None], 0)
        else:
            is_in_C, own_C = _in_chunk(columns_C, logits_CK)
            grad_CK.scatter_add_(1, own_C[:, None], torch.where(is_in_C, grad_logprobs_C, 0)[:, None])
    return grad_CK.to(dtype), grad_CK.sum(0) if needs_bias else None


def _in_chunk(columns_C: torch.Tensor, chunk_CK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which columns are in the chunk, and 0 for those that are not."""
    is_in_C = (columns_C >= 0) & (columns_C < chunk_CK.shape[1])
    return is_in_C, torch.where(is_in_C, columns_C, 0)


def _slices(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    for start in range(0, num_tokens, chunk_tokens):
        yield slice(start, min(start + chunk_tokens, num_tokens))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the precision of sums."""
    return torch.promote_types(dtype, torch.float32)
