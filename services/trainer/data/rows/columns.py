"""Finds the columns of a table that hold the prompt, the correct answer and the images.

    hiyouga/geometry3k               problem, answer, images list<struct<bytes, path>>
    chenhegu/geo3k_imgurl            the same, images list<string> of base64 data URIs
    VeraIsHere/geo3k_imgurl_processed    the same, the problem with a tool protocol in it
    CAIR-HKISI/geo3k                 the same, images list<binary>, the answer as \\boxed{x}
    verl, prepared                   prompt list<struct<role, content>>, images, reward_model.ground_truth
    SkyRL, prepared                  prompt of messages with parts, reward_spec.ground_truth
    slime                            problem or prompt or input, answer or label, images
    ShareGPT                         conversations list<struct<from, value>>, images
    GEOQA_R1V, multimodal-open-r1    problem, image, solution with <answer>x</answer>
    MathVista, MathVision            question, answer, image string (the name of a file), decoded_image struct

Invariant: without settings, a column is chosen only if no other one could be meant. A column that looks like images is
never silently left unread, but for the names of files beside another column of images.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import DataError
from services.trainer.data.config import SourceConfig
from services.trainer.data.rows.images import has_image, names_image
from services.trainer.data.rows.messages import read_roles

_TEXT = (("problem", "prompt"), ("question", "query", "input", "messages", "conversations"))
SOLUTION = "solution"
"""Column with a worked solution, which marks the correct answer."""
_GOLD = (("answer", "reward_model", "reward_spec"), ("label", "ground_truth", "target"))
_IMAGES = (("images", "image"),)
_CONVERSATION = (("messages", "conversations"), ("problem", "prompt"), ("question", "query", "input"))
_COMPLETION = (("completion", "response", "output"),)
"""Names by rank: those of a later rank are read if none of the earlier ranks exists."""
_SYSTEM = ("system", "system_prompt")
"""Names of columns that hold a row's system message apart from its prompt."""
_NAMED = ("profile_column", "environment_column", "sampling_column", "tools_column", "limits_column")
"""Settings that name a further column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of one table; a dotted name is a field of a struct."""

    text: str
    gold: str
    """The correct answer, or in supervised training the assistant's; empty if the text's messages include it."""
    images: tuple[str, ...]
    extra: tuple[str, ...] = ()
    """Further columns that travel with the prompt."""


def find_columns(row: Mapping[str, Any], config: SourceConfig, *, name: str) -> Columns:
    """Choose the columns of a table: those that the settings name, else the only ones with a published name.

    Args:
        row: A value of each column, from one or several of the table's first rows; None if they have none.
        config: The settings.
        name: Name of the table in error messages.

    Raises:
        DataError: a column is missing, several could be meant, or images would stay unread.
    """
    return _with_the_rest(
        row,
        config,
        text=_text_column(row, config, _TEXT, name=name, what="the prompt's text"),
        gold=_one(
            row, config.answer_column, (*_GOLD, (SOLUTION,)), "answer_column", name=name, what="the correct answer"
        ),
        name=name,
    )


def find_demonstration_columns(row: Mapping[str, Any], config: SourceConfig, *, name: str) -> Columns:
    """Choose the columns of a table for supervised training: a conversation, or a prompt and its completion.

    Args:
        row: As for `find_columns`.
        config: The settings.
        name: Name of the table in error messages.

    Raises:
        DataError: as for `find_columns`.
    """
    text = _text_column(row, config, _CONVERSATION, name=name, what="the conversation or the prompt")
    gold = _completion_column(row, config, read_roles(cell(row, text)), name=name)
    return _with_the_rest(row, config, text=text, gold="" if gold == text else gold, name=name)


def cell(row: Mapping[str, Any], column: str) -> Any:
    """Return the value in a column; None if the row has none there.

    Args:
        row: Values by column.
        column: A column's name, or a dotted path into a column of structs.
    """
    if column in row:
        return row[column]
    value: Any = row
    for key in column.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def require_no_system_message(row: Mapping[str, Any], columns: Columns, config: SourceConfig) -> None:
    """Refuse a demonstration's system message in a column that nothing reads, unless the settings choose the columns.

    Raises:
        ValueError: there is one.
    """
    if "*" not in config.extra_columns:
        return
    read = (columns.text, columns.gold, *(getattr(config, key) for key in _NAMED))
    for column in _SYSTEM:
        if column not in read and isinstance(text := row.get(column), str) and text.strip():
            raise ValueError(
                f"column {column!r} holds a system message that would not be learned from; make the prompt a list of "
                "messages that begins with it, or leave all further columns out with --data.extra_columns=[]"
            )


def _text_column(
    row: Mapping[str, Any], config: SourceConfig, ranks: Sequence[Sequence[str]], *, name: str, what: str
) -> str:
    found = _one(row, config.problem_column, ranks, "problem_column", name=name, what=what)
    if not config.problem_column and found == "input" and "instruction" in row:  # Alpaca's form
        raise DataError(
            f"{name}: columns instruction and input are one prompt together; join them into a column prompt, or choose "
            "one with --data.problem_column=instruction or --data.problem_column=input"
        )
    return found


def _completion_column(row: Mapping[str, Any], config: SourceConfig, roles: Sequence[str], *, name: str) -> str:
    """Return the column that follows messages of these roles; empty if nothing does."""
    what = "what the assistant says"
    if not config.answer_column:
        if roles and roles[-1] == "assistant":
            return ""
        if "assistant" in roles:  # in earlier turns of a prompt, or before a last word of the user's
            return _find(row, _COMPLETION, "answer_column", name=name, what=what) or ""
    return _one(row, config.answer_column, (*_COMPLETION, *_GOLD), "answer_column", name=name, what=what)


def _with_the_rest(row: Mapping[str, Any], config: SourceConfig, *, text: str, gold: str, name: str) -> Columns:
    """Add the columns of images and the further columns."""
    columns = Columns(text=text, gold=gold, images=_image_columns(row, config, name=name))
    for key in _NAMED:
        if wanted := getattr(config, key):
            _one(row, wanted, (), key, name=name, what="")
    if config.images_column == "":
        _require_all_images(row, columns, kept=config.extra_columns, name=name)
    return replace(columns, extra=_extra(row, columns, config, name=name))


def _image_columns(row: Mapping[str, Any], config: SourceConfig, *, name: str) -> tuple[str, ...]:
    if config.images_column == "":
        found = _find(row, _IMAGES, "images_column", name=name, what="images")
        return () if found is None else (_with_images(row, found),)
    wanted = (config.images_column,) if isinstance(config.images_column, str) else config.images_column
    return tuple(_one(row, column, (), "images_column", name=name, what="images") for column in wanted)


def _require_all_images(row: Mapping[str, Any], columns: Columns, *, kept: Sequence[str], name: str) -> None:
    """Refuse images that no column reads; beside a column of images, names of files may stay unread.

    Columns that are `kept` by name are for environments and verifiers.
    """
    read = (columns.text, columns.gold, *columns.images, *kept)
    is_alone = not columns.images
    unread = [column for column, value in row.items() if column not in read and has_image(value, or_its_name=is_alone)]
    if unread and is_alone:
        raise DataError(
            f"{name}: column {unread[0]!r} holds images that would not be read; name it with "
            f"--data.images_column={unread[0]}, or train on the text alone with --data.images_column=[]"
        )
    if unread:
        every = json.dumps([*columns.images, *unread], separators=(",", ":"), ensure_ascii=False)
        raise DataError(
            f"{name}: column {unread[0]!r} holds images that would not be read beside those of {columns.images[0]!r}; "
            f"read all with --data.images_column={every}, or one with --data.images_column={columns.images[0]}"
        )


def _with_images(row: Mapping[str, Any], found: str) -> str:
    """Return the only column with images themselves if `found` has names of files, which may not be beside the data."""
    if isinstance(row[found], str) and names_image(row[found]):
        images = [column for column, value in row.items() if has_image(value)]
        return images[0] if len(images) == 1 else found
    return found


def _extra(row: Mapping[str, Any], columns: Columns, config: SourceConfig, *, name: str) -> tuple[str, ...]:
    read = {column.partition(".")[0] for column in columns.images} | {columns.text, columns.gold}
    wanted = dict.fromkeys(column for column in config.extra_columns if column != "*")
    if "*" in config.extra_columns:
        wanted |= dict.fromkeys(column for column in row if column not in read)
    return tuple(_one(row, column, (), "extra_columns", name=name, what="") for column in wanted)


def _one(row: Mapping[str, Any], wanted: str, ranks: Sequence[Sequence[str]], key: str, *, name: str, what: str) -> str:
    if wanted:
        if wanted in row or wanted.partition(".")[0] in row:
            return wanted
        missing = f"has no column {wanted!r}"
    elif found := _find(row, ranks, key, name=name, what=what):
        return found
    else:
        missing = f"has no column {' or '.join(column for rank in ranks for column in rank)} with {what}"
    raise DataError(f"{name} {missing}; it has {', '.join(row)}. Name the right one with --data.{key}=...")


def _find(row: Mapping[str, Any], ranks: Sequence[Sequence[str]], key: str, *, name: str, what: str) -> str | None:
    for rank in ranks:
        found = [column for column in rank if column in row]
        if len(found) > 1:
            raise DataError(
                f"{name}: columns {' and '.join(found)} could both hold {what}; choose one with "
                f"--data.{key}={found[0]} or --data.{key}={found[1]}"
            )
        if found:
            return found[0]
    return None
