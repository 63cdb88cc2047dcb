"""Settings of the data: section `[data]` of a recipe."""

from collections.abc import Mapping
from typing import Any, Final, Literal, Self

import pydantic

from penstock.config import Config
from penstock.config.paths import OptionalPath, expand_home
from penstock.names import SINGLE_TURN
from services.trainer.data.limits import LimitsConfig

ANSWER: Final = "{answer}"
"""Placeholder for a row's answer in `answer_format`."""


class SourceConfig(Config):
    """A source of rows, and how to read them."""

    path: str | tuple[str, ...] = ""
    """File (.parquet, .arrow, .jsonl, .json, .csv), folder, glob, or data set on the Hugging Face Hub (`owner/name`);
    or a list of files, folders and globs. `@[10:20]` at the end selects rows. Empty: the built-in data set."""
    hub_config: str = ""
    """Configuration of a data set on the Hub. Empty: the only or the default one."""
    split: str = ""
    """Split of a data set on the Hub or in a folder. Empty: `train`, or the only one."""
    revision: str = ""
    """Branch, tag or commit of a data set on the Hub. Empty: its main branch. A run's config.toml has the commit."""
    kinds: tuple[Literal["x", "y", "length", "distance"], ...] = pydantic.Field(
        default=("x", "y", "length"), min_length=1
    )
    """Kinds of problem in the built-in data set of 10,000 rows, which is used when path is empty."""
    sheet_cells: int = pydantic.Field(default=1, ge=1, le=20)
    """Show each built-in picture in one cell of a sheet with this many cells along each edge, too small to read without
    zooming in. 1: the picture alone."""
    unzoomed: float = pydantic.Field(default=0.0, ge=0, le=1)
    """For `penstock sft` on sheets: the share of demonstrations that answer at once instead of zooming in."""
    misaimed: float = pydantic.Field(default=0.0, ge=0, le=1)
    """For `penstock sft` on sheets: the share of the other demonstrations that zoom in on an empty cell."""
    images_column: str | tuple[str, ...] = ""
    """Column with each row's images, or a list of columns. Empty: `images` or `image`, if there is one. An empty list:
    no images, the prompts are text."""
    problem_column: str = ""
    """Column with the text, one `<image>` per image, or with a list of messages. A dot selects a field of a struct.
    Empty: `problem` or `prompt`, else `question`, `query`, `input`, `messages` or `conversations`."""
    answer_column: str = ""
    """Column with the correct answer, or a list of accepted answers. A dot selects a field of a struct:
    `reward_model.ground_truth`. Empty: `answer`, `reward_model` or `reward_spec`, else `label`, `ground_truth` or
    `target`, else `solution` if a tag, a box or a last line `#### x` in it marks the answer. If it is the column of the
    prompt's messages, the last message is the answer. For `penstock sft` it has the completion of the prompt. Empty
    then means: none if messages end with the assistant's, else `completion`, `response` or `output`, else none if
    messages have the assistant's, else as above."""
    answer_format: str = ""
    """For `penstock sft`: the assistant's message where rows have a bare answer, with `{answer}` in its place, as in
    `\\boxed{{answer}}`. Labels and boxes around a row's answer are removed first; the first of several answers counts.
    Empty: the answer's column has the assistant's own words."""
    profile_column: str = ""
    """Column with a row's reward profile. If empty, and for rows without one: `profile`."""
    environment_column: str = ""
    """Column with a row's environment. If empty, and for rows without one: `environment`."""
    sampling_column: str = ""
    """Column with a struct of a row's own sampling: a `max_new_tokens` that is lower than the run's, and in evaluation
    sets `temperature`, `top_p` and `top_k`. Empty: none."""
    tools_column: str = ""
    """Column with the tools that the policy may call, as a list in OpenAI's form or as its JSON text. The model's chat
    template shows them. Empty: none."""
    tools: tuple[dict[str, pydantic.JsonValue], ...] = ()
    """Tools of rows that have none of their own, each in OpenAI's form: `[[data.tools]]` with a `function`."""
    chat_template_kwargs: dict[str, pydantic.JsonValue] = pydantic.Field(default_factory=dict)
    """Further variables of the model's chat template: `enable_thinking = false`. A name that the template does not read
    is rejected."""
    limits: LimitsConfig = LimitsConfig()
    limits_column: str = ""
    """Column with a struct of a row's own limits, or its JSON text; each replaces the same limit of `limits`. Empty:
    none."""
    extra_columns: tuple[str, ...] = ("*",)
    """Columns that travel with the prompt, for environments and reports; `*` means all columns that are not read
    otherwise. Bytes are left out."""
    images_first: bool = False
    """Put the images of a row whose text has no `<image>` before its first user message's text. Otherwise such a row is
    rejected. The number of these rows is logged."""
    image_folder: OptionalPath = None
    """Folder that image paths are relative to and may not leave. Unset: the data file's."""
    image_urls: bool = False
    """Download images whose cell is an http address: at most 64 MiB, in 10 s at each of four tries, kept in
    `data.cache_dir`."""
    min_pixels: int = pydantic.Field(default=0, ge=0)
    """Enlarge images with fewer pixels. An image's own `min_pixels`, in its struct, takes precedence. 0: no bound."""
    max_pixels: int = pydantic.Field(default=0, ge=0)
    """Shrink images with more pixels. An image's own `max_pixels`, in its struct, takes precedence. 0: no bound."""
    prompt_suffix: str = ""
    """Text appended to the last user message, for example an instruction on how to give the answer."""
    system_prompt: str = ""
    """System message put before each prompt; empty means none. Rows with their own system message are rejected."""
    profile: str = "geo3k"
    """Reward profile that judges the answers."""
    environment: str = SINGLE_TURN
    """Environment that plays the prompts."""

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths; empty for the built-in data set."""
        return ((self.path,) if self.path else ()) if isinstance(self.path, str) else self.path

    @pydantic.field_validator("path")
    @classmethod
    def _expand_home(cls, path: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return expand_home(path) if isinstance(path, str) else tuple(map(expand_home, path))

    @pydantic.model_validator(mode="after")
    def _is_meant(self) -> Self:
        if "" in self.paths:
            raise ValueError("path holds an empty name; give a file, a folder or a glob")
        if self.answer_format and ANSWER not in self.answer_format:
            raise ValueError(
                f"answer_format = {self.answer_format!r} has no {ANSWER}, so that all rows would be answered alike; "
                f"write for example \\boxed{{{ANSWER}}}"
            )
        for number, tool in enumerate(self.tools):
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError(
                    f"tools.{number} has no function with a name; write a tool in OpenAI's form, "
                    '{type = "function", function = {name = ..., description = ..., parameters = {...}}}'
                )
        if 0 < self.max_pixels < self.min_pixels:
            raise ValueError(f"max_pixels = {self.max_pixels} is below min_pixels = {self.min_pixels}; raise it")
        return self


class MixedSourceConfig(SourceConfig):
    """One of several sources. Settings that it omits are taken from the section it is in."""

    weight: float = pydantic.Field(default=1.0, gt=0)
    """Its share of the prompts, relative to the other sources' weights, rounded to a thousandth."""


class PoolConfig(Config):
    """Pools of rows that the policy always or never solves, and how often they are played."""

    easy_rate: float = pydantic.Field(default=1.0, gt=0, le=1)
    """A row is in the easy pool if at least this share of its samples passed at its last play. A sample passes with a
    reward of at least 0.5."""
    hard_rate: float = pydantic.Field(default=0.0, ge=0, lt=1)
    """A row is in the hard pool if at most this share of its samples passed at its last play."""
    easy_chance: float = pydantic.Field(default=1.0, ge=0, le=1)
    """Probability with which a row of the easy pool is played when it comes up. 0: never again."""
    hard_chance: float = pydantic.Field(default=1.0, ge=0, le=1)
    """Probability with which a row of the hard pool is played when it comes up. 0: never again."""

    @property
    def are_used(self) -> bool:
        """Whether any row is ever passed over."""
        return min(self.easy_chance, self.hard_chance) < 1

    @pydantic.model_validator(mode="after")
    def _bounds_are_apart(self) -> Self:
        if self.hard_rate >= self.easy_rate:
            raise ValueError(
                f"hard_rate = {self.hard_rate:g} is not below easy_rate = {self.easy_rate:g}: a row would be in both "
                "pools; lower hard_rate or raise easy_rate"
            )
        return self


class DataConfig(SourceConfig):
    """The source of the prompts. With `sources`, settings here apply to each source that does not override them."""

    shuffle: bool = True
    """Reshuffle the rows for each epoch; otherwise keep the order of the file."""
    max_prompt_tokens: int = pydantic.Field(default=0, ge=0)
    """Rows with a longer prompt, images included, are passed over. 0: those that leave less than
    sampling.max_new_tokens of the context; see filters.overlong_prompts."""
    wrong_rows: Literal["refuse", "drop"] = "refuse"
    """Rows that cannot be read or sent, such as a truncated image or an empty answer. refuse: the run ends and names
    the row. drop: they are passed over, counted and logged."""
    memory_gib: float = pydantic.Field(default=4.0, gt=0)
    """Memory for decoded rows, in GiB. Larger files are read piece by piece, as rows are played."""
    cache_dir: OptionalPath = None
    """Folder for prompt lengths and downloaded images. Unset: `penstock` in XDG_CACHE_HOME or ~/.cache."""
    pools: PoolConfig = PoolConfig()
    sources: dict[str, MixedSourceConfig] = pydantic.Field(default_factory=dict)
    """Several sources to mix, by name, instead of `path`."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _pass_on(cls, values: Any) -> Any:
        """Fill in the settings that each source omits."""
        if not isinstance(values, Mapping) or not isinstance(values.get("sources"), Mapping):
            return values
        common = {key: value for key, value in values.items() if key in SourceConfig.model_fields and key != "path"}
        sources = {name: passed_on(common, source) for name, source in values["sources"].items()}
        return {**values, "sources": sources}

    @pydantic.model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.sources and self.path:
            raise ValueError("path and sources exclude each other; move path into a source, [data.sources.NAME]")
        return self

    @pydantic.field_serializer("sources")
    def _leave_out_what_was_passed_on(self, sources: dict[str, MixedSourceConfig], info: Any) -> dict[str, Any]:
        """Serialize only each source's own settings, so that a changed value in `[data]` reaches it."""
        own = {name: getattr(self, name) for name in SourceConfig.model_fields}
        return {
            name: source.model_dump(
                mode=info.mode, exclude_none=info.exclude_none, exclude=_passed_on_keys(own, source)
            )
            for name, source in sources.items()
        }

    def weight(self, name: str) -> float:
        """Return the weight of a source, relative to the others'."""
        return self.sources[name].weight if self.sources else 1.0

    @property
    def by_name(self) -> dict[str, SourceConfig]:
        """The sources in the order of their names; a single source is named ""."""
        return dict(sorted(self.sources.items())) if self.sources else {"": self}


def passed_on(common: Mapping[str, Any], given: Any) -> Any:
    """Return a source's settings, with those that it omits taken from `common`, nested sections included."""
    if not isinstance(given, Mapping):
        return given
    within = {
        key: passed_on(common[key], value) for key, value in given.items() if isinstance(common.get(key), Mapping)
    }
    return {**common, **given, **within}


def _passed_on_keys(own: Mapping[str, Any], source: Config) -> dict[str, Any]:
    """Return the keys of `source` whose values equal those of `own`, in the form of pydantic's `exclude`."""
    keys: dict[str, Any] = {}
    for key, value in own.items():
        found = getattr(source, key)
        if found == value:
            keys[key] = True
        elif isinstance(found, Config):
            keys[key] = _passed_on_keys(dict(value), found)
    return keys
