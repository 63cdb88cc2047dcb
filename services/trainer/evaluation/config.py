"""Settings of evaluations: section `[evaluation]` of a recipe."""

import re
from collections.abc import Mapping
from typing import Any, Literal, Self

import pydantic

from penstock.config import Config, SamplingConfig
from penstock.records import TRAIN
from services.trainer.data.config import DataConfig, SourceConfig, passed_on

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_OF_THE_PATH = ("path", "hub_config", "split", "revision")
"""Settings that are another data set's if a set names a path of its own."""


class EvaluationSetConfig(SourceConfig):
    """One evaluation set. What it leaves out is as in `[data]` and `[sampling]`; a set with a path of its own, or with
    held-out pictures, takes no path, split, revision or configuration from there."""

    pictures: Literal["training", "held_out"] = "training"
    """Pictures of the built-in data set: those that training draws from, or those that no training draws. held_out
    names the built-in data set also where `[data]` names another."""
    num_prompts: int = pydantic.Field(default=0, ge=0)
    """How many rows to play, from the first. 0: all; the built-in data set has 10,000."""
    samples_per_prompt: int = pydantic.Field(default=1, ge=1)
    """Answers to each prompt, the n of avg@n. More answers make the standard error smaller, and pass@k and maj@k are
    computed for the powers of two up to n."""
    temperature: float = pydantic.Field(default=1.0, ge=0, le=100)
    """Divides the logits; 0 is greedy decoding."""
    top_p: float = pydantic.Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 samples from the whole distribution."""
    top_k: int = pydantic.Field(default=-1, ge=-1)
    """Sample from this many of the likeliest tokens; -1: from all."""
    max_new_tokens: int = pydantic.Field(default=512, ge=1)
    """Largest number of tokens in one turn."""
    pass_score: float = 1.0
    """Score from which on a sample counts as correct in pass@k and maj@k. avg@n is the mean of the scores."""
    break_down_by: str = ""
    """Column by whose values the results are broken down, for example `data_source`; a dot leads into a struct. It must
    be one of `extra_columns`. Empty: no break-down."""

    @pydantic.model_validator(mode="after")
    def _holds_out_pictures_of_its_own(self) -> Self:
        if self.path and self.pictures != "training":
            raise ValueError(
                f"pictures = {self.pictures!r} chooses among built-in pictures, and path names other data; remove one"
            )
        return self

    def data(self, shared: DataConfig) -> DataConfig:
        """How to read its rows, with the memory and the cache of `shared`."""
        own = {name: getattr(self, name) for name in SourceConfig.model_fields}
        return DataConfig(shuffle=False, memory_gib=shared.memory_gib, cache_dir=shared.cache_dir, **own)


class EvaluationConfig(Config):
    """Sets of prompts on which a policy is measured: by `penstock eval`, and while a run trains if it says when.

    An evaluation is of one policy version, which some replicas keep while the others train on.
    """

    every: int = pydantic.Field(default=0, ge=0)
    """Steps between the evaluations of a run. 0: none by steps."""
    at_start: bool = False
    """Evaluate the model with which the run begins."""
    at_end: bool = False
    """Evaluate after the last step."""
    held_out_replicas: int = pydantic.Field(default=1, ge=0)
    """Replicas that keep the version of an evaluation and play nothing else until it has ended, while training goes on
    with the others; of prefill and decode replicas, so many of each. At least one is left for training. 0: none; all
    replicas play the evaluation beside training, and the next update waits for it. That is also what happens where no
    replica can be spared."""
    sets: dict[str, EvaluationSetConfig] = pydantic.Field(default_factory=dict)
    """The sets, by name."""

    @property
    def is_in_training(self) -> bool:
        """Whether a run evaluates at all."""
        return self.every > 0 or self.at_start or self.at_end

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
    """Give each evaluation set of a recipe, before it is validated, what it leaves out.

    Args:
        recipe: The recipe as its file has it.

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
