"""Patterns of parameters: which rate each has, which layers take adapters, and patterns that were not meant."""

import pytest

from penstock.errors import ConfigError
from penstock.model.families.qwen_vl import part_of
from services.trainer.backend.policy.adapters import add_adapters
from services.trainer.checks.parameter_patterns import linear_layers, rates_of
from services.trainer.config import LoraConfig
from tests.support.trainer.families import FULL_FAMILIES

NAMES = [
    "model.visual.patch_embed.proj.weight",
    "model.visual.blocks.0.attn.qkv.bias",
    "model.visual.merger.norm.weight",
    "model.visual.deepstack_merger_list.0.linear_fc1.weight",
    "model.language_model.embed_tokens.weight",
    "model.language_model.layers.0.mlp.up_proj.weight",
    "model.language_model.norm.weight",
    "lm_head.weight",
]


def test_every_parameter_has_a_part() -> None:
    """Of a vision-language model, and of a language model."""
    assert [part_of(name) for name in NAMES] == [*["tower"] * 2, *["merger"] * 2, *["text"] * 3, "head"]
    assert part_of("model.layers.0.mlp.up_proj.weight") == "text"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("tower", {0, 1}),
        ("merger", {2, 3}),
        ("head", {7}),
        ("visual.*", {0, 1, 2, 3}),
        ("model.visual.merger.*", {2}),
        ("*.bias", {1}),
        ("norm.weight", {2, 6}),
        ("layers.0.*", {5}),
    ],
)
def test_a_pattern_is_a_part_or_the_end_of_a_name(pattern: str, expected: set[int]) -> None:
    """Ends begin after a dot."""
    rates = rates_of(NAMES, {pattern: 0.5}, default=1.0)
    assert {number for number, name in enumerate(NAMES) if rates[name] == 0.5} == expected
    assert set(rates.values()) <= {0.5, 1.0}


def test_the_last_pattern_that_fits_counts() -> None:
    """So a second recipe can make an exception from the first."""
    rates = rates_of(NAMES, {"visual.*": 0.0, "merger": 0.5}, default=1.0)
    assert [rates[name] for name in NAMES] == [0, 0, 0.5, 0.5, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"vision.*": 0.0}, r"no parameter fits 'vision\.\*'; this model has the parts .*tower"),
        ({"blocks": 0.0}, "no parameter fits 'blocks'"),
        ({"merger": 0.1, "visual.*": 0.0}, "later patterns decide for all that 'merger' fits; put it after them"),
        ({"*": 0.0}, "every parameter has rate 0"),
    ],
)
def test_a_pattern_without_effect_is_refused(patterns: dict[str, float], message: str) -> None:
    """A typing error would otherwise train parameters that the user wants frozen."""
    with pytest.raises(ConfigError, match=message):
        rates_of(NAMES, patterns, default=1.0)


def test_a_tied_head_is_explained() -> None:
    """Its weight is the embedding's."""
    with pytest.raises(ConfigError, match="no parameter fits 'head'; the head of this model is its embedding"):
        rates_of(NAMES[:-1], {"head": 0.0}, default=1.0)


@pytest.mark.parametrize("kind", list(FULL_FAMILIES))
def test_layers_that_take_adapters_are_told_by_name(kind: str) -> None:
    """They are those to which the trainer gives one, of every family."""
    model = FULL_FAMILIES[kind]()
    told = linear_layers([name for name, _ in model.named_parameters()])
    assert sorted(told) == sorted(add_adapters(model, LoraConfig(rank=1, targets=("*",))))
