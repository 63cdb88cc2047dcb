"""Compares the reward profiles and environments that prompts name with those that they may name, before any process
starts. The processes would refuse every group that names another one.

The names are those of the processes that start here. Profiles are not compared if `worker.reward_address` names another
reward service, which may have verifiers of its own.
"""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from penstock.errors import ConfigError
from services.recipe import Recipe
from services.rollout.worker.environments.config import environment_names
from services.trainer.data.config import SourceConfig

_MAX_SHOWN = 64
"""Characters of an unknown name in an error."""


class Named(Protocol):
    """What names a profile and an environment: a row, or the settings of its source."""

    @property
    def profile(self) -> str:
        """Name of the reward profile."""
        ...

    @property
    def environment(self) -> str:
        """Name of the environment, or of an agent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNames:
    """Names that prompts may use."""

    profile: Sequence[str] | None
    """Profiles of the reward service; None if it is another machine's."""
    environment: Sequence[str]
    """Environments and agents of the workers."""

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        """Return the names that the processes of a recipe know. No verifier and no environment is imported."""
        from services.reward.profiles.registry import profile_names  # slow, and most commands need no names

        worker = recipe.worker
        return cls(
            profile=None if worker.reward_address else sorted(profile_names(recipe.reward)),
            environment=sorted((*environment_names(worker.environments), *worker.agents)),
        )

    def require(self, row: Named) -> None:
        """Check the names of a row.

        Raises:
            ValueError: one is unknown.
        """
        for key, unknown in self.unknown(row):
            raise ValueError(f"its {key} = {unknown}")

    def unknown(self, named: Named) -> Iterator[tuple[str, str]]:
        """Yield the key of each unknown name, and what to say of its value."""
        for key in ("profile", "environment"):
            known, name = getattr(self, key), getattr(named, key)
            if known is not None and name not in known:
                similar = difflib.get_close_matches(name[:_MAX_SHOWN], known, n=1)
                meant = f"did you mean {similar[0]!r}? " if similar else ""
                yield key, f"{name[:_MAX_SHOWN]!r} is unknown; {meant}known: {', '.join(known)}"


def require_names(recipe: Recipe, *, data: bool = True, sets: bool, known: KnownNames | None = None) -> None:
    """Check the profiles and environments that a recipe's settings name.

    Args:
        recipe: The recipe.
        data: Whether its prompts are played.
        sets: Whether its evaluation sets are.
        known: Names that they may use; None: those that the processes of the recipe know.

    Raises:
        ConfigError: one is unknown.
    """
    named: dict[str, SourceConfig] = {}
    if data:
        named |= {f"data.sources.{name}" if name else "data": each for name, each in recipe.data.by_name.items()}
    if sets:
        named |= {f"evaluation.sets.{name}": each for name, each in recipe.evaluation.sets.items()}
    known = known or KnownNames.of(recipe)
    for section, each in named.items():
        for key, unknown in known.unknown(each):
            is_inherited = getattr(each, key) == getattr(recipe.data, key)
            raise ConfigError(f"{'data' if is_inherited else section}.{key} = {unknown}")
