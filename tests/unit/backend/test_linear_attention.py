"""Linear attention over packed rows: what transformers' own layer gives for each sequence alone; faults that show."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.errors import ConfigError
from services.trainer.backend.policy.attention import RowLayout
from services.trainer.backend.policy.linear_attention import delta_layers_of, use_packed_linear_attention
from services.trainer.batching.rows import Segment
from services.trainer.batching.segment_batches import SegmentBatches
from tests.support.trainer.families import heard, random_qwen3_5_text
from tests.unit.backend.test_packed_attention import segments_of

CPU = torch.device("cpu")
WIDTH = 64
ROWS: dict[str, list[tuple[int, list[int]]]] = {
    "one token": [(0, [1])],
    "one sequence of several chunks": [(0, [150])],
    "sequences alone": [(0, [70, 1, 2, 64, 65, 130, 3])],
    "a group": [(40, [50, 60, 1])],
    "prompts shorter than the convolution": [(1, [5, 90]), (2, [1, 3])],
    "long prompts, long responses": [(130, [70, 140, 3]), (64, [64, 65])],
    "groups beside sequences alone": [(0, [80]), (30, [7, 9]), (0, [3, 4]), (90, [100, 2])],
}
"""Tokens of a prefix, and of the segments behind it."""


@pytest.fixture
def layers() -> tuple[Any, Any]:
    """A layer that reads packed rows, and transformers' own with the same weights."""
    ours, theirs = (heard(random_qwen3_5_text()) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    use_packed_linear_attention(ours)
    return next(delta_layers_of(ours)), next(delta_layers_of(theirs))


def packed(layer: Any, segments: Sequence[Segment], hidden_TX: torch.Tensor) -> torch.Tensor:
    """[T, X] of a row."""
    output: torch.Tensor = layer(hidden_TX[None], row_layout=RowLayout(segments, CPU))[0]
    return output


def alone(layer: Any, segments: Sequence[Segment], hidden_TX: torch.Tensor) -> torch.Tensor:
    """[T, X] of each segment behind its prefix, one by one."""
    outputs = []
    for segment in segments:
        num_before = segment.prefix_stop - segment.prefix_start
        before, own = hidden_TX[segment.prefix_start : segment.prefix_stop], hidden_TX[segment.start : segment.stop]
        outputs.append(layer(torch.cat([before, own])[None])[0, num_before:])
    return torch.cat(outputs)


def tensors(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states, and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    hidden_TX, gradient_TX = (torch.randn(num_tokens, WIDTH, generator=generator) for _ in range(2))
    return hidden_TX, gradient_TX


def computed(function: Any, layer: Any, segments: Sequence[Segment]) -> dict[str, torch.Tensor]:
    """Output, and the gradients of the hidden states and of all parameters."""
    hidden_TX, gradient_TX = tensors(segments[-1].stop)
    hidden_TX.requires_grad_()
    output = function(layer, segments, hidden_TX)
    output.backward(gradient_TX)
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"output": output.detach(), "hidden states": hidden_TX.grad, **gradients}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_packed_rows_and_group_rows_give_what_each_sequence_gives_alone(
    layers: tuple[Any, Any], row: list[tuple[int, list[int]]]
) -> None:
    """Outputs, and gradients of hidden states and of every parameter, within 1e-5 of the largest number."""
    segments = segments_of(row)
    ours, theirs = computed(packed, layers[0], segments), computed(alone, layers[1], segments)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        error = float((ours[name] - expected).abs().max())
        assert error <= 1e-5 * max(1.0, float(expected.abs().max())), name


def moved_boundary(segments: list[Segment]) -> list[Segment]:
    """A response's last token belongs to the next one."""
    first, second = segments[1:3]
    return [segments[0], replace(first, stop=first.stop - 1), replace(second, start=second.start - 1), *segments[3:]]


def joined(segments: list[Segment]) -> list[Segment]:
    """Two responses are one."""
    return [segments[0], replace(segments[1], stop=segments[2].stop), *segments[3:]]


def other_prefix(segments: list[Segment]) -> list[Segment]:
    """A response begins with the state of another prompt."""
    other = next(segment for segment in segments[1:] if segment.prefix_stop == 0)
    return [segments[0], replace(segments[1], prefix_start=other.start, prefix_stop=other.stop), *segments[2:]]


def no_prefix(segments: list[Segment]) -> list[Segment]:
    """A response forgets its prompt."""
    return [segments[0], replace(segments[1], prefix_start=0, prefix_stop=0), *segments[2:]]


@torch.no_grad()
@pytest.mark.parametrize("fault", [moved_boundary, joined, other_prefix, no_prefix], ids=lambda fault: fault.__name__)
def test_a_fault_is_felt(layers: tuple[Any, Any], fault: Any) -> None:
    """By more than 1e-2 in some output: a thousand times what the test above allows.

    Also behind the tokens whose convolution sees the boundary, which is by the state alone.
    """
    segments = segments_of([(20, [30, 9]), (21, [8, 70])])
    hidden_TX, _ = tensors(segments[-1].stop)
    change = packed(layers[0], fault(segments), hidden_TX) - packed(layers[0], segments, hidden_TX)
    start = segments[1].start if fault in (other_prefix, no_prefix) else segments[2].start
    assert float(change[start:].abs().max()) > 1e-2
    assert float(change[start + 3 :].abs().max()) > 1e-2


@torch.no_grad()
def test_states_are_float32_in_half_precision(layers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Products before and behind the rule are rounded, those of states are not: they would add up token by token."""
    rule = layers[0].delta_rule
    seen: list[tuple[torch.dtype, bool]] = []

    def watched(query: torch.Tensor, *args: Any, **settings: Any) -> Any:
        seen.append((query.dtype, torch.is_autocast_enabled("cpu")))
        return rule(query, *args, **settings)

    monkeypatch.setattr(layers[0], "delta_rule", watched)
    segments = segments_of([(20, [30])])
    hidden_TX, _ = tensors(50)
    exact = packed(layers[0], segments, hidden_TX)
    with torch.autocast("cpu", torch.bfloat16):
        ours = packed(layers[0], segments, hidden_TX)
    assert seen == [(torch.float32, False)] * 2 + [(torch.bfloat16, False)] * 2
    theirs = alone(layers[1].bfloat16(), segments, hidden_TX.bfloat16())
    assert ours.dtype == torch.bfloat16
    assert float((ours - exact).norm()) <= 1.1 * float((theirs - exact).norm())


def test_padding_is_less_than_half_of_a_batch() -> None:
    """Segments of a few chunks do not pay for the longest of the row."""
    segments = segments_of([(0, [2000, 1100, 100, 70, *[64] * 20])])
    index = SegmentBatches.of(segments, 3, CPU)
    assert sorted(batch.tokens_SM.shape for batch in index.batches) == [(2, 103), (2, 2003), (20, 67)]
    places = [batch.tokens_SM[:, 3:] for batch in index.batches]
    assert torch.cat([each.flatten() for each in places])[index.places_T].tolist() == list(range(segments[-1].stop))


def test_refuses_linear_attention_of_another_kind() -> None:
    """When the model is loaded: transformers would let the samples of a row see each other."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    linear = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    experts["shared_expert_intermediate_size"] = 8
    config = Qwen3NextConfig(**sizes, **linear, **experts, head_dim=8, vocab_size=8, num_hidden_layers=4)
    with pytest.raises(ConfigError, match=r"models of type qwen3_next cannot read packed rows: .* choose another"):
        use_packed_linear_attention(Qwen3NextForCausalLM(config))
