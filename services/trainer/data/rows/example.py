"""Turns rows of a data set into examples: the part of a prompt that comes from the data, or a demonstration.

Invariant: the images that an example's messages refer to are exactly the images beside them, in order.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.model.images import decode_image, read_sizes
from penstock.records import Limits, Message
from services.trainer.data.config import ANSWER, SourceConfig
from services.trainer.data.json_values import as_json, without_nulls
from services.trainer.data.limits import LimitsConfig
from services.trainer.data.rows.columns import SOLUTION, Columns, cell, require_no_system_message
from services.trainer.data.rows.golds import read_golds, read_solution
from services.trainer.data.rows.images import ImageReader
from services.trainer.data.rows.messages import (
    Turn,
    make_messages,
    place_images,
    read_completion,
    read_demonstration,
    read_turns,
    split_answer,
)
from services.trainer.data.rows.sampling import read_sampling

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """The part of a prompt that comes from a data set, or a demonstration: a conversation for supervised training."""

    messages: tuple[Message, ...]
    images: tuple[bytes, ...]
    golds: tuple[str, ...]
    """Correct answers; empty in a demonstration."""
    profile: str
    """The reward service's profile that judges it."""
    environment: str
    """The environment that plays it."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tools that the policy may call, each in OpenAI's form."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""
    max_new_tokens: int | None = None
    """Most tokens of a turn; None: the run's limit."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Its own temperature, top_p and top_k, in an evaluation set."""
    limits: Limits = field(default_factory=Limits)
    """The budgets of its episodes; none in a demonstration."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The row's further columns, as JSON."""
    images_put_first: bool = False
    """Whether the row's text had no `<image>`, and the images were put before it."""


def make_example(
    row: Mapping[str, Any],
    columns: Columns,
    config: SourceConfig,
    reader: ImageReader,
    *,
    is_evaluated: bool = False,
) -> Example:
    """Turn a row into an example.

    Args:
        row: Values by column.
        columns: Which of them to read.
        config: How to read them.
        reader: Reads the images.
        is_evaluated: Whether the row is of an evaluation set, which may set all of its sampling.

    Raises:
        ValueError: a value is not valid for its column.
        InvalidRequestError: an image cannot be decoded, or is too large.
    """
    turns = _read(read_turns, row, columns.text)
    if columns.gold == columns.text:
        turns, answer = _read(lambda _: split_answer(turns), row, columns.text)
        golds = _read(lambda _: read_golds(answer), row, columns.gold)
    else:
        is_solution = columns.gold == SOLUTION and not config.answer_column
        golds = _read(read_solution if is_solution else read_golds, row, columns.gold)
    return _example(row, columns, config, reader, turns, golds=golds, is_evaluated=is_evaluated)


def make_demonstration(row: Mapping[str, Any], columns: Columns, config: SourceConfig, reader: ImageReader) -> Example:
    """Turn a row into a demonstration.

    Args:
        row: Values by column.
        columns: Which of them to read, from `find_demonstration_columns`.
        config: How to read them.
        reader: Reads the images.

    Raises:
        ValueError: a value is not valid for its column, the assistant's messages cannot be learned as they are, or a
            further column holds a system message and the row's messages have none.
        InvalidRequestError: an image cannot be decoded, or is too large.
    """
    turns = _read(read_demonstration, row, columns.text)
    if all(turn.role != "system" for turn in turns):
        require_no_system_message(row, columns, config)
    if columns.gold and config.answer_format:
        gold = _read(read_golds, row, columns.gold)[0]
        turns += read_completion(config.answer_format.replace(ANSWER, gold))
    elif columns.gold:
        turns += _read(read_completion, row, columns.gold)
    return _example(row, columns, config, reader, turns, golds=(), is_demonstration=True)


def _example(
    row: Mapping[str, Any],
    columns: Columns,
    config: SourceConfig,
    reader: ImageReader,
    turns: tuple[Turn, ...],
    *,
    golds: tuple[str, ...],
    is_demonstration: bool = False,
    is_evaluated: bool = False,
) -> Example:
    _require_unicode(*golds, *(piece for turn in turns for piece in turn.pieces if isinstance(piece, str)))
    placed, cells = place_images(
        turns,
        [image for column in columns.images for image in _images(cell(row, column))],
        images_first=config.images_first,
    )
    images = tuple(reader.read(image) for image in cells)
    for number, data in enumerate(images):
        decode_image(data, field=f"image {number}")  # in full, as the engine will, to find truncated files
    limits = Limits() if is_demonstration else _limits(row, config).as_record()
    sampling = read_sampling(
        cell(row, config.sampling_column) if config.sampling_column else None,
        config.sampling_column,
        is_evaluated=is_evaluated,
    )
    max_new_tokens = sampling.pop("max_new_tokens", None)
    _require_within(limits, images)
    return Example(
        messages=make_messages(
            placed,
            prompt_suffix=config.prompt_suffix,
            system_prompt=config.system_prompt,
            is_demonstration=is_demonstration,
        ),
        images=images,
        golds=golds,
        profile=_named(row, config.profile_column) or config.profile,
        environment=_named(row, config.environment_column) or config.environment,
        tools=_tools(row, config.tools_column) or config.tools,
        chat_template_kwargs=config.chat_template_kwargs,
        max_new_tokens=None if max_new_tokens is None else int(max_new_tokens),
        sampling=sampling,
        limits=limits,
        extra={
            name: as_json(value)
            for name, value in ((name, cell(row, name)) for name in columns.extra)
            if not isinstance(value, bytes | None)
        },
        images_put_first=placed != turns,
    )


def _require_unicode(*texts: str) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"a text has half of a character at {error.start} ({text[error.start]!r})") from None


def _read(read: Callable[[Any], T], row: Mapping[str, Any], column: str) -> T:
    try:
        return read(cell(row, column))
    except ValueError as error:
        raise ValueError(f"column {column!r} holds {error}") from None


def _named(row: Mapping[str, Any], column: str) -> str:
    value = cell(row, column) if column else None
    if isinstance(value, str | None):
        return value or ""
    raise ValueError(f"column {column!r} holds {type(value).__name__}; want a name as text")


def _tools(row: Mapping[str, Any], column: str) -> tuple[dict[str, Any], ...]:
    """Return a row's tools. Null fields of structs belong to other tools, because a column has one type."""
    given = cell(row, column) if column else None
    try:
        tools = json.loads(given) if isinstance(given, str) and given else given or []
    except (ValueError, RecursionError) as error:
        raise ValueError(f"column {column!r} holds text that is no JSON: {error}") from None
    match tools:
        case [*found] if all(isinstance(tool, Mapping) and tool.get("function") for tool in found):
            plain = map(as_json, found)
            return tuple(plain if isinstance(given, str) else map(without_nulls, plain))
    raise ValueError(f"column {column!r} holds {str(given)[:80]}; want a list of tools in OpenAI's form, or its JSON")


def _limits(row: Mapping[str, Any], config: SourceConfig) -> LimitsConfig:
    if not config.limits_column:
        return config.limits
    return _read(config.limits.of_row, row, config.limits_column)


def _require_within(limits: Limits, images: Sequence[bytes]) -> None:
    """Check that the prompt's own images fit into the budgets of its episodes."""
    num_pixels = sum(width * height for width, height in read_sizes(images)) if limits.max_pixels else 0
    for name, number, most in (
        ("max_images", len(images), limits.max_images),
        ("max_pixels", num_pixels, limits.max_pixels),
    ):
        if most is not None and number > most:
            raise ValueError(f"its images come to {number}, above limits.{name} = {most}; raise it or shrink them")


def _images(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
