"""Patterns of a recipe that choose parameters by name: their learning rates, and the layers that get adapters.

They need names alone, so they are checked before anything heavy is loaded, and again with the names of what is loaded.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from penstock.errors import ConfigError
from penstock.model.families.qwen_vl import PARTS, part_of
from penstock.weights.adapter_names import LORA_A, LORA_B
from services.trainer.config import LoraConfig, OptimizerConfig

_RATES = "trainer.optimizer.learning_rates"
_TARGETS = "trainer.lora.targets"


def require_fitting(names: Sequence[str], *, lora: LoraConfig, optimizer: OptimizerConfig) -> None:
    """Check that every pattern decides for something, and that something is trained.

    Args:
        names: Own names of all parameters, without adapters.
        lora: With a rank, adapters alone are trained.
        optimizer: The learning rates.

    Raises:
        ConfigError: as `adapted_layers` and `rates_of`.
    """
    if lora.rank:
        layers = adapted_layers(linear_layers(names), lora.targets)
        names = [layer + matrix for layer in layers for matrix in (LORA_A, LORA_B)]
    rates_of(names, optimizer.learning_rates, default=optimizer.learning_rate)


def matches(name: str, pattern: str) -> bool:
    """Return whether a parameter is in the part called `pattern`, or its name, or a tail after a dot, matches it."""
    return part_of(name) == pattern or fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def rates_of(names: Sequence[str], patterns: Mapping[str, float], *, default: float) -> dict[str, float]:
    """Return the learning rate of each parameter; 0 is frozen.

    Args:
        names: Own names of all parameters.
        patterns: Rate by pattern. The last pattern that matches a name counts.
        default: Rate of parameters that no pattern matches.

    Raises:
        ConfigError: a pattern decides for no parameter, or all parameters are frozen.
    """
    deciding = {name: next((p for p in reversed(list(patterns)) if matches(name, p)), None) for name in names}
    for pattern in patterns:
        if pattern in deciding.values():
            continue
        if any(matches(name, pattern) for name in names):
            raise ConfigError(f"{_RATES}: later patterns decide for all that {pattern!r} fits; put it after them")
        found = sorted({part_of(name) for name in names})
        tied = "; the head of this model is its embedding" if pattern == "head" else ""
        raise ConfigError(
            f"{_RATES}: no parameter fits {pattern!r}{tied}; this model has the parts {', '.join(found)}, of "
            f"{', '.join(PARTS)}, and names such as {names[0]} and {names[-1]}"
        )
    rates = {name: default if pattern is None else patterns[pattern] for name, pattern in deciding.items()}
    if not any(rates.values()):
        raise ConfigError(f"{_RATES}: every parameter has rate 0, so nothing is trained; give one pattern a rate")
    return rates


def adapted_layers(layers: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Return the layers that get an adapter, in their order.

    Args:
        layers: Names of those that may have one, as of `linear_layers`.
        targets: The patterns.

    Raises:
        ConfigError: a pattern fits no layer.
    """
    for pattern in targets:
        if not any(matches(layer, pattern) for layer in layers):
            kinds = sorted({layer.rpartition(".")[2] for layer in layers})
            raise ConfigError(
                f"{_TARGETS}: no linear layer fits {pattern!r}; this model's are {', '.join(kinds)}, in parts such as "
                "text and tower. Output head, experts and their routers take no adapter"
            )
    return [layer for layer in layers if any(matches(layer, pattern) for pattern in targets)]


def linear_layers(names: Iterable[str]) -> list[str]:
    """Return the layers that may have an adapter: linear ones, but neither head nor experts nor their routers.

    Args:
        names: Own names of all parameters.
    """
    layers = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    return [layer for layer in layers if _takes_an_adapter(layer)]


def _takes_an_adapter(layer: str) -> bool:
    is_of_mixture = ".mlp.experts." in layer or layer.endswith(".mlp.gate")
    is_linear = not any(kind in layer for kind in ("embed", "norm", "merger.ln_q"))
    return is_linear and not is_of_mixture and part_of(f"{layer}.") != "head"
