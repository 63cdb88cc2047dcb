"""Learning rates of parts of the model: patterns of the recipe, resolved to one rate for each parameter."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from penstock.errors import ConfigError
from penstock.model.families.qwen_vl import PARTS, part_of

_SETTING = "trainer.optimizer.learning_rates"


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
            raise ConfigError(f"{_SETTING}: later patterns decide for all that {pattern!r} fits; put it after them")
        found = sorted({part_of(name) for name in names})
        tied = "; the head of this model is its embedding" if pattern == "head" else ""
        raise ConfigError(
            f"{_SETTING}: no parameter fits {pattern!r}{tied}; this model has the parts {', '.join(found)}, of "
            f"{', '.join(PARTS)}, and names such as {names[0]} and {names[-1]}"
        )
    rates = {name: default if pattern is None else patterns[pattern] for name, pattern in deciding.items()}
    if not any(rates.values()):
        raise ConfigError(f"{_SETTING}: every parameter has rate 0, so nothing is trained; give one pattern a rate")
    return rates
