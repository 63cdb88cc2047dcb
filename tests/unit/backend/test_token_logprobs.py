"""Log-probabilities in chunks: equal to all logits at once, with their gradients, however they are cut."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from services.trainer.backend.policy import compiled, logprobs
from services.trainer.backend.policy.logprobs import token_logprobs

NUM_TOKENS, HIDDEN, VOCABULARY = 37, 24, 101
TEMPERATURE = 0.7
FORBIDDEN = torch.tensor([0, 1, 2, 3, 4, 5, 6, 50, 100])
"""The first chunk of seven ids holds nothing else."""


@pytest.fixture(params=[(1000, 1000), (5, 7), (37, 7), (5, 1000)], ids=str)
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One chunk, which is kept, or several, which are computed again."""
    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", request.param[0])
    monkeypatch.setattr(logprobs, "CHUNK_IDS", request.param[1])
    return


def inputs(dtype: torch.dtype, *, bias: bool = True) -> dict[str, Any]:
    """Confident logits: their spread is several nats."""
    generator = torch.Generator().manual_seed(0)
    allowed = [token for token in range(VOCABULARY) if token not in FORBIDDEN.tolist()]
    picked = torch.randint(len(allowed), (NUM_TOKENS,), generator=generator)
    return {
        "hidden_NH": torch.randn(NUM_TOKENS, HIDDEN, generator=generator, dtype=dtype, requires_grad=True),
        "weight_VH": torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=dtype, requires_grad=True),
        "bias_V": torch.randn(VOCABULARY, generator=generator, dtype=dtype, requires_grad=True) if bias else None,
        "targets_N": torch.tensor(allowed)[picked],
        "temperature": TEMPERATURE,
        "forbidden_ids": FORBIDDEN,
    }


def plain(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """All logits at once, by torch's own functions."""
    logits = torch.nn.functional.linear(given["hidden_NH"], given["weight_VH"], given["bias_V"]) / given["temperature"]
    logits = logits.index_fill(1, given["forbidden_ids"], -math.inf)
    logprobs_NV = logits.log_softmax(-1)
    entropies_N = torch.special.entr(logprobs_NV.exp())
    # entr has a gradient of infinity at 0: leave forbidden ids out before it.
    allowed = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, given["forbidden_ids"], value=False)
    kept = logprobs_NV[:, allowed]
    assert torch.allclose(entropies_N.sum(1), -(kept.exp() * kept).sum(1))
    return logprobs_NV.gather(1, given["targets_N"][:, None]).squeeze(1), -(kept.exp() * kept).sum(1)


def gradients(given: dict[str, Any], outputs: tuple[torch.Tensor, torch.Tensor], use: str) -> list[torch.Tensor]:
    """Of a weighted sum of the outputs that are used."""
    weights = torch.linspace(-1, 2, NUM_TOKENS, dtype=outputs[0].dtype)
    losses = {"logprobs": (weights * outputs[0]).sum(), "entropies": (weights.flip(0) * outputs[1]).sum()}
    loss = sum(losses.values()) if use == "both" else losses[use]
    leaves = [tensor for tensor in given.values() if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
    return list(torch.autograd.grad(loss, leaves))


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("use", ["logprobs", "entropies", "both"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_all_logits_at_once(dtype: torch.dtype, tolerance: float, use: str, bias: bool) -> None:
    """Values, and gradients of hidden states, weights and bias, of either output alone and of both."""
    given = inputs(dtype, bias=bias)
    ours, theirs = token_logprobs(**given), plain(given)
    assert ours.entropy_N.max() > 1
    torch.testing.assert_close(ours[:2], theirs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        gradients(given, ours, use), gradients(given, theirs, use), rtol=10 * tolerance, atol=10 * tolerance
    )


@pytest.mark.usefixtures("_chunks")
def test_the_gradient_is_that_of_differences() -> None:
    """In float64, by finite differences: not only what torch's functions say."""
    given = inputs(torch.float64)
    leaves = {name: given.pop(name) for name in ("hidden_NH", "weight_VH", "bias_V")}

    def outputs(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return token_logprobs(**dict(zip(leaves, tensors, strict=True)), **given)[:2]

    assert torch.autograd.gradcheck(outputs, tuple(leaves.values()), fast_mode=True)


@pytest.mark.usefixtures("_chunks")
def test_a_frozen_head_costs_no_gradient_of_it() -> None:
    """The hidden states' gradient is the same."""
    given = inputs(torch.float64)
    expected, *_ = gradients(given, token_logprobs(**given), "both")
    frozen = given | {"weight_VH": given["weight_VH"].detach(), "bias_V": given["bias_V"].detach()}
    [found] = gradients(frozen, token_logprobs(**frozen), "both")
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("_chunks")
def test_logits_far_from_zero_lose_nothing() -> None:
    """A confident model: logits of hundreds, where exp() would overflow."""
    given = inputs(torch.float32)
    given["hidden_NH"] = (given["hidden_NH"].detach() * 100).requires_grad_()
    exact = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in given.items()
    }
    ours, theirs = token_logprobs(**given), plain(exact)
    torch.testing.assert_close(ours.logprobs_N.double(), theirs[0], rtol=1e-5, atol=1e-3)
    assert bool(torch.isfinite(ours.entropy_N).all())


def test_few_logits_exist_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where torch allocates: the largest tensor of a forward and backward pass is a chunk or a gradient."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        """Remembers the most elements of any result."""

        num_elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.num_elements = max(self.num_elements, result.numel())
            return result

    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", 8)
    monkeypatch.setattr(logprobs, "CHUNK_IDS", 32)
    given = inputs(torch.float32)
    with Largest() as largest:
        token_logprobs(**given).logprobs_N.sum().backward()
    assert largest.num_elements == VOCABULARY * HIDDEN < NUM_TOKENS * VOCABULARY


@pytest.mark.parametrize("autocast", [True, False])
def test_products_follow_autocast_and_sums_do_not(autocast: bool) -> None:
    """In bfloat16 the error is that of the products alone: a few percent of a nat."""
    given = inputs(torch.float32)
    exact = plain(given)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        ours = token_logprobs(**given)
    error = float((ours.logprobs_N - exact[0]).detach().abs().max())
    assert ours.logprobs_N.dtype == torch.float32
    assert (1e-4 < error < 0.3) is autocast
    gradients(given, ours, "both")


def test_a_float32_head_rounds_what_it_reads_and_not_what_it_computes() -> None:
    """Under bfloat16, values equal those of float32 on rounded inputs; the products' own rounding is far larger."""
    given = inputs(torch.float32, bias=False)
    leaves = {name: given[name].detach().bfloat16().float().requires_grad_() for name in ("hidden_NH", "weight_VH")}
    rounded = given | leaves
    exact = plain(rounded)[0]
    with torch.autocast("cpu", torch.bfloat16):
        in_float32 = token_logprobs(**given, float32_head=True)
        in_bfloat16 = token_logprobs(**given)
    torch.testing.assert_close(in_float32.logprobs_N, exact, rtol=1e-5, atol=1e-5)
    assert (in_bfloat16.logprobs_N - exact).abs().max() > 1e-3
    found = gradients(given, in_float32, "both")
    for one, expected in zip(found, gradients(rounded, token_logprobs(**rounded), "both"), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, expected, rtol=2**-8, atol=1e-5)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.variant)])
def test_kept_products_are_those_that_are_computed_again(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bit of every gradient is the same, and the head is multiplied once less."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    compiled.compiled.cache_clear()
    num_products = 0
    plainly = logprobs._Head.products

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal num_products
        num_products += 1
        return plainly(*arguments)

    monkeypatch.setattr(logprobs._Head, "products", counted)
    given = inputs(torch.bfloat16)
    found = {}
    for keeps in (False, True):
        before = num_products
        outputs = token_logprobs(**given, is_compiled=is_compiled, keeps_products=keeps)
        found[keeps] = [*outputs[:2], *gradients(given, outputs[:2], "both")]
        found[keeps].append(torch.tensor(num_products - before))
    *of_again, again = found[False]
    *of_kept, kept = found[True]
    assert all(map(torch.equal, of_kept, of_again))
    is_whole = NUM_TOKENS <= logprobs.CHUNK_TOKENS and VOCABULARY <= logprobs.CHUNK_IDS
    is_whole |= is_compiled and VOCABULARY <= logprobs.CHUNK_IDS
    assert again == (kept if is_whole else 2 * kept)
    with torch.no_grad():
        assert torch.equal(token_logprobs(**given, keeps_products=True).logprobs_N, of_kept[0])
    compiled.compiled.cache_clear()


@pytest.mark.usefixtures("_chunks")
def test_a_float32_head_changes_nothing_in_float32() -> None:
    """Every bit is the same."""
    given = inputs(torch.float32)
    assert all(map(torch.equal, token_logprobs(**given, float32_head=True)[:2], token_logprobs(**given)[:2]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "chunks"), [(torch.float32, (1000, 1000)), (torch.bfloat16, (5, 40))], ids=["whole", "cut"]
)
def test_compiled_it_is_the_same(dtype: torch.dtype, chunks: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and all gradients, of logits that are kept or computed again. It is traced as for kernels, which are not
    made.
    """
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    monkeypatch.setattr(logprobs, "COMPILED_CHUNK_TOKENS", chunks[0])
    monkeypatch.setattr(logprobs, "CHUNK_IDS", chunks[1])
    torch._dynamo.reset()
    compiled.compiled.cache_clear()
    given = inputs(dtype)
    plainly, fused = token_logprobs(**given), token_logprobs(**given, is_compiled=True)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for ours, theirs in zip(fused[:2], plainly[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(gradients(given, fused, "both"), gradients(given, plainly, "both"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    compiled.compiled.cache_clear()
