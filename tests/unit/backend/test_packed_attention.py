"""Attention over packed rows: what a full mask gives, for every arrangement of segments, forwards and backwards."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from penstock.errors import ConfigError
from services.trainer.backend.policy import attention
from services.trainer.backend.policy.attention import RowLayout, packed_attention, packed_attention_of_gpus
from services.trainer.backend.policy.varlen import VarlenIndex, gather
from services.trainer.batching.rows import Segment
from tests.support.trainer import varlen_on_cpu

CPU = torch.device("cpu")
HEADS, KEY_HEADS, DIM = 4, 2, 8
MODULE = torch.nn.Identity()

blocks = st.tuples(st.integers(0, 40), st.lists(st.integers(1, 40), min_size=1, max_size=4))
"""Tokens of a prefix, which may be missing, and of the segments behind it."""


def segments_of(row: list[tuple[int, list[int]]]) -> list[Segment]:
    """Put blocks behind each other."""
    segments, place = [], 0
    for prefix, lengths in row:
        begin, end = place, place + prefix
        if prefix:
            segments.append(Segment(start=begin, stop=end))
        place = end
        for length in lengths:
            segments.append(Segment(start=place, stop=place + length, prefix_start=begin, prefix_stop=end))
            place += length
    return segments


def visible(segments: list[Segment]) -> torch.Tensor:
    """bool[T, T]: written down from the words of the docstring, token by token."""
    size = segments[-1].stop
    mask = torch.zeros(size, size, dtype=torch.bool)
    for segment in segments:
        for token in range(segment.start, segment.stop):
            mask[token, segment.prefix_start : segment.prefix_stop] = True
            mask[token, segment.start : token + 1] = True
    return mask


def inputs(num_tokens: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Query, key, value and a gradient."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, heads, num_tokens, DIM, generator=generator, dtype=dtype)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    ]


def run(function: Any, num_tokens: int) -> list[torch.Tensor]:
    """Output and the three gradients."""
    *tensors, gradient = inputs(num_tokens)
    for tensor in tensors:
        tensor.requires_grad_()
    output = function(*tensors)
    output.backward(gradient)
    return [output.detach(), *(tensor.grad for tensor in tensors)]


@pytest.fixture(scope="module", params=[16, 256])
def block_queries(request: pytest.FixtureRequest) -> Iterator[None]:
    """Blocks shorter than most segments, or longer than all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK_QUERIES", request.param)
        yield


@pytest.mark.usefixtures("block_queries")
@given(st.lists(blocks, min_size=1, max_size=3))
@settings(max_examples=30)
def test_equals_a_full_mask(row: list[tuple[int, list[int]]]) -> None:
    """Prefix in full, self causally, nothing else; gradients of all responses add up in the prompt's keys."""
    segments = segments_of(row)
    mask, layout = visible(segments), RowLayout(segments, CPU)

    def packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output, weights = packed_attention(MODULE, query, key, value, None, scaling=0.3, row_layout=layout)
        assert weights is None
        return output.transpose(1, 2)

    def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)

    for ours, theirs in zip(run(packed, len(mask)), run(masked, len(mask)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@given(st.lists(blocks, min_size=1, max_size=3))
@settings(max_examples=30)
def test_a_gpu_computes_the_same(row: list[tuple[int, list[int]]]) -> None:
    """In one call, whose documented meaning is spelled out; forwards, and backwards through the gathered keys."""
    segments = segments_of(row)
    layout = RowLayout(segments, CPU)

    def plainly(*tensors: torch.Tensor) -> torch.Tensor:
        return packed_attention(MODULE, *tensors, None, scaling=0.3, row_layout=layout)[0].transpose(1, 2)

    def on_gpu(*tensors: torch.Tensor) -> torch.Tensor:
        return packed_attention_of_gpus(MODULE, *tensors, scaling=0.3, row_layout=layout)[0].transpose(1, 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "varlen_attn", varlen_on_cpu.varlen_attn)
        found = run(on_gpu, segments[-1].stop)
    for ours, theirs in zip(found, run(plainly, segments[-1].stop), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_gradients_of_a_prompt_are_summed_in_float32() -> None:
    """In bfloat16 each of a thousand small ones would be lost beside the sum."""
    num_responses = 1000
    index = VarlenIndex.of(segments_of([(1, [1] * num_responses)]), CPU)
    states = torch.zeros(1 + num_responses, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    gathered = gather(states, index)
    assert "_Gathered" in type(gathered.grad_fn).__name__  # torch's own is exact on CPUs, and not on GPUs
    gathered.backward(torch.full_like(gathered, 1.0))
    assert states.grad[0].item() == 1000.0  # the prompt's own key, and each response's, rounded to bfloat16 once
    assert (states.grad[1:] == 1).all()


def test_short_segments_share_a_call() -> None:
    """A batch of short answers to few prompts costs few calls, not one for each answer."""
    layout = RowLayout(segments_of([(30, [7, 9, 12, 3]), (30, [5] * 4), (31, [6] * 4)]), CPU)
    assert sorted(bucket.query_tokens_SQ.shape for bucket in layout.buckets) == [(3, 32), (4, 16), (8, 16)]


def test_products_are_made_in_the_values_precision() -> None:
    """Norms of queries and keys come out of autocast in float32; the values say what was meant."""
    segments = segments_of([(5, [7, 9])])
    query, key, value, _ = inputs(segments[-1].stop, torch.float32)
    layout = RowLayout(segments, CPU)
    output, _ = packed_attention(MODULE, query, key, value.bfloat16(), None, scaling=0.3, row_layout=layout)
    exact, _ = packed_attention(MODULE, query, key, value, None, scaling=0.3, row_layout=layout)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("takes_options", [False, True], ids=["torch 2.11", "newer"])
def test_a_gpu_is_asked_in_the_words_of_its_torch(takes_options: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that can do this knows no options."""
    asked: dict[str, Any] = {}

    def older(query: torch.Tensor, *_: Any, scale: float, window_size: tuple[int, int]) -> torch.Tensor:
        asked.update(scale=scale, window_size=window_size)
        return query

    def newer(
        query: torch.Tensor, *_: Any, enable_gqa: bool = False, num_splits: int | None = None, **also: Any
    ) -> torch.Tensor:
        asked.update(enable_gqa=enable_gqa, num_splits=num_splits, **also)
        return query

    monkeypatch.setattr(varlen, "varlen_attn", newer if takes_options else older)
    query, key, value, _ = inputs(9)
    layout = RowLayout(segments_of([(3, [6])]), CPU)
    packed_attention_of_gpus(MODULE, query, key, value, scaling=0.3, row_layout=layout)
    options = {"enable_gqa": key.shape[1] != query.shape[1], "num_splits": 1} if takes_options else {}
    assert asked == {"scale": 0.3, "window_size": (-1, 0)} | options


@pytest.mark.parametrize("wish", [{"sliding_window": 4}, {"softcap": 30.0}, {"s_aux": torch.zeros(HEADS)}])
def test_refuses_attention_that_it_does_not_do(wish: dict[str, Any]) -> None:
    """Instead of computing something else in silence."""
    query, key, value, _ = inputs(4)
    layout = RowLayout(segments_of([(0, [4])]), CPU)
    with pytest.raises(ConfigError, match=f"attends with {next(iter(wish))}"):
        packed_attention(MODULE, query, key, value, None, scaling=0.3, row_layout=layout, **wish)


def test_refuses_models_with_sliding_windows() -> None:
    """When the model is loaded, not in the first step."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3Config(
        **sizes, head_dim=8, vocab_size=8, num_hidden_layers=2, use_sliding_window=True, max_window_layers=1
    )
    with pytest.raises(ConfigError, match=r"models of type qwen3 .*'sliding_attention'"):
        attention.use_packed_attention(Qwen3ForCausalLM(config))
