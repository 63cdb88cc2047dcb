"""Settings of evaluations: section `[evaluation]` of a recipe."""

import re
from collections.abc import Mapping
from typing import Any, Literal, Self

import pydantic

from penstock.config import Config, SamplingConfig
from penstock.names import TRAIN
from services.trainer.data.config import DataConfig, SourceConfig, passed_on

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_OF_THE_PATH = ("path", "hub_config", "split", "revision")
"""Settings that a set with its own path does not take from `[data]`."""


class EvaluationSetConfig(SourceConfig):
    """One evaluation set. Settings that it omits are taken from `[data]` and `[sampling]`; a set with its own path, or
    with held-out pictures, takes no path, split, revision or configuration from there."""

    pictures: Literal["training", "held_out"] = "training"
    """Pictures of the built-in data set: those that training draws from, or those that training never draws. held_out
    selects the built-in data set even if `[data]` names another."""
    num_prompts: int = pydantic.Field(default=0, ge=0)
    """Rows to play, from the first. 0: all; the built-in data set has 10,000."""
    samples_per_prompt: int = pydantic.Field(default=1, ge=1)
    """Answers to each prompt, the n of avg@n. More answers reduce the standard error; pass@k and maj@k are computed for
    the powers of two up to n."""
    temperature: float = pydantic.Field(default=1.0, ge=0, le=100)
    """Divides the logits; 0 is greedy decoding."""
    top_p: float = pydantic.Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 samples from the whole distribution."""
    top_k: int = pydantic.Field(default=-1, ge=-1)
    """Sample from this many of the most likely tokens; -1: from all."""
    max_new_tokens: int = pydantic.Field(default=512, ge=1)
    """Largest number of tokens in one turn."""
    pass_score: float = 1.0
    """Smallest score of a correct sample in pass@k and maj@k. avg@n is the mean of the scores."""
    break_down_by: str = ""
    """Column by whose values the results are broken down, for example `data_source`; a dot selects a field of a struct.
    It must be one of `extra_columns`. Empty: no breakdown."""

    @pydantic.model_validator(mode="after")
    def _holds_out_pictures_of_its_own(self) -> Self:
        if self.path and self.pictures != "training":
            raise ValueError(
                f"pictures = {self.pictures!r} chooses among built-in pictures, and path names other data; remove one"
            )
        return self

    def data(self, shared: DataConfig) -> DataConfig:
        """Return the settings for reading its rows, with the memory and the cache of `shared`."""
        own = {name: getattr(self, name) for name in SourceConfig.model_fields}
        return DataConfig(shuffle=False, memory_gib=shared.memory_gib, cache_dir=shared.cache_dir, **own)


class EvaluationConfig(Config):
    """Sets of prompts that measure a policy: with `penstock eval`, and during training at the steps set here.

    An evaluation measures one policy version, which some replicas keep while training goes on with the others.
    """

    every: int = pydantic.Field(default=0, ge=0)
    """Steps between the evaluations of a run. 0: no periodic evaluation."""
    at_start: bool = False
    """Evaluate the model that the run begins with."""
    at_end: bool = False
    """Evaluate after the last step."""
    held_out_replicas: int = pydantic.Field(default=1, ge=0)
    """Replicas that keep the version of an evaluation and play nothing else until it has ended, while training goes on
    with the others; with prefill and decode replicas, this many of each. At least one is left for training. 0, or if no
    replica can be spared: all replicas play the evaluation beside training, and the next update waits for it."""
    sets: dict[str, EvaluationSetConfig] = pydantic.Field(default_factory=dict)
    """The sets, by name."""

    @property
    def is_in_training(self) -> bool:
        """Whether a run evaluates at all."""
        return self.every > 0 or self.at_start or self.at_end

    def holds_replicas_out(self, num_steps: int) -> bool:
        """Return whether a run of `num_steps` holds replicas out if it can spare some: not after its last step."""
        return self.held_out_replicas > 0 and (self.at_start or 0 < self.every < num_steps)

    @pydantic.model_validator(mode="after")
    def _has_sets(self) -> Self:
        if self.is_in_training and not self.sets:
            raise ValueError("every, at_start and at_end need a set; add one, [evaluation.sets.NAME]")
        return self

    @pydantic.field_validator("sets")
    @classmethod
    def _are_names(cls, sets: dict[str, EvaluationSetConfig]) -> dict[str, EvaluationSetConfig]:
        for name in sets:
            if name == TRAIN or not _NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} cannot name an evaluation set; use letters, digits, '_' and '-', and not {TRAIN!r}"
                )
        return sets


def inherit(recipe: Any) -> Any:
    """Fill in the settings that each evaluation set of an unvalidated recipe omits.

    Args:
        recipe: The recipe as read from its file.

    Raises:
        ValueError: a set names no path, and `[data]` has several.
    """
    sets = _table(_table(recipe, "evaluation"), "sets")
    if not sets:
        return recipe
    for name, given in sets.items():
        if _table(_table(recipe, "data"), "sources") and isinstance(given, Mapping) and not _names_its_data(given):
            raise ValueError(f"evaluation.sets.{name} has no path, and [data.sources] has several; give it one")
    data, sampling = _table(recipe, "data"), _table(recipe, "sampling")
    common = {key: value for key, value in data.items() if key in SourceConfig.model_fields}
    common |= {key: value for key, value in sampling.items() if key in SamplingConfig.model_fields}
    of_others = {key: value for key, value in common.items() if key not in _OF_THE_PATH}
    whole = {name: passed_on(of_others if _names_its_data(given) else common, given) for name, given in sets.items()}
    return {**recipe, "evaluation": {**recipe["evaluation"], "sets": whole}}


def _names_its_data(given: Any) -> bool:
    return isinstance(given, Mapping) and ("path" in given or given.get("pictures") == "held_out")


def _table(tree: Any, key: str) -> Mapping[str, Any]:
    found = tree.get(key) if isinstance(tree, Mapping) else None
    return found if isinstance(found, Mapping) else {}
