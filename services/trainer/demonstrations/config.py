"""Settings of the demonstrations that a run learns beside its groups: section `[demonstrations]` of a recipe.

Imports nothing heavy, so that a mistyped key is reported before torch is loaded.
"""

from typing import Self

import pydantic

from services.trainer.data.config import DataConfig


class DemonstrationsConfig(DataConfig):
    """Conversations that every optimizer step of `penstock train` learns beside its groups, `samples_per_step` at a
    time. The loss of the step is that of `[algorithm]` plus `coef` times the cross-entropy of their learned tokens.
    Without this section there are none. Rows are read as `penstock sft` reads them. The settings are those of `[data]`,
    but no value is taken over from there."""

    samples_per_step: int = pydantic.Field(default=8, ge=1)
    """Demonstrations in each optimizer step."""
    coef: float = pydantic.Field(default=0.1, gt=0)
    """Factor of the cross-entropy, which is a mean over the learned tokens of the step's demonstrations alone."""
    max_tokens: int = pydantic.Field(default=0, ge=0)
    """Demonstrations with more tokens, images included, are passed over, never cut. 0: those that exceed the model's
    context."""
    path: str | tuple[str, ...] = ""
    """Where they are; as `data.path`. Empty: in the sources, [demonstrations.sources.NAME]. A source without a path is
    the built-in data set."""

    @pydantic.model_validator(mode="after")
    def _are_meant(self) -> Self:
        if not self.paths and not self.sources:
            raise ValueError(
                "path is empty and there are no sources, so that there is nothing to learn; give path, or leave the "
                "section out. A source without a path, [demonstrations.sources.NAME], is the built-in data set"
            )
        if self.pools.are_used:
            raise ValueError(
                "pools pass over rows by the share of their samples that passed, and demonstrations are not played; "
                "leave easy_chance and hard_chance at 1"
            )
        if self.max_prompt_tokens:
            raise ValueError(
                f"max_prompt_tokens = {self.max_prompt_tokens} bounds prompts that are played; bound whole "
                "conversations with max_tokens"
            )
        return self

    def describe(self) -> str:
        """Describe in one line what a step learns."""
        places = [path for source in self.by_name.values() for path in source.paths or ("the built-in data set",)]
        return f"{self.samples_per_step} demonstrations a step from {', '.join(places)}, with coef {self.coef:g}"
