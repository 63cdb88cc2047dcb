"""Rows to demonstrations: conversations, prompts with completions, bare answers; and what is refused, in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config import load
from penstock.errors import ConfigError, DataError
from penstock.model.chat.chat_template import Renderer
from penstock.records import ImagePart, TextPart
from services.recipe import Recipe
from services.trainer.data.config import DataConfig
from services.trainer.data.dataset import open_dataset
from services.trainer.data.prompt_length import ConversationLimit
from services.trainer.data.rows.example import Example
from services.trainer.data.sources.opening import open_sources
from services.trainer.data.sources.source import DEMONSTRATIONS
from services.trainer.data.sources.table import NUM_SHOWN_ROWS
from tests.support.trainer.data.pictures import png


def first(tmp_path: Path, row: dict[str, Any], **settings: Any) -> Example:
    """The demonstration that a file with this row holds."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    return open_sources(DataConfig(path=str(file), **settings), form=DEMONSTRATIONS)[""][0]


def shown(example: Example) -> list[tuple[str, str]]:
    """Role and text of each message, with a mark for each image."""
    return [
        (m.role, "".join(part.text if isinstance(part, TextPart) else f"<{part.index}>" for part in m.parts))
        for m in example.messages
    ]


USER, ASSISTANT = {"role": "user", "content": "Find x."}, {"role": "assistant", "content": "5"}
AGAIN = {"role": "user", "content": "Are you sure?"}
ASKED, SAID, ASKED_AGAIN = ("user", "Find x."), ("assistant", "5"), ("user", "Are you sure?")


@pytest.mark.parametrize(
    ("row", "settings", "conversation"),
    [
        ({"messages": [USER, ASSISTANT], "prompt": "x", "prompt_id": 3}, {}, [ASKED, SAID]),
        ({"messages": [USER, ASSISTANT], "answer": "7"}, {}, [ASKED, SAID]),
        ({"conversations": [{"from": "human", "value": "Find x."}, {"from": "gpt", "value": "5"}]}, {}, [ASKED, SAID]),
        ({"prompt": "Find x.", "completion": "5"}, {}, [ASKED, SAID]),
        ({"prompt": [USER], "completion": [ASSISTANT]}, {}, [ASKED, SAID]),
        ({"prompt": [USER, ASSISTANT, AGAIN], "completion": [ASSISTANT]}, {}, [ASKED, SAID, ASKED_AGAIN, SAID]),
        ({"messages": [USER, ASSISTANT], "completion": "7"}, {}, [ASKED, SAID]),
        ({"messages": [USER, ASSISTANT, AGAIN], "answer": "7"}, {}, [ASKED, SAID, ASKED_AGAIN]),
        ({"question": "Find x.", "response": "5"}, {}, [ASKED, SAID]),
        ({"problem": "Find x.", "answer": "5"}, {}, [ASKED, SAID]),
        ({"text": "Find x.", "told": "5"}, {"problem_column": "text", "answer_column": "told"}, [ASKED, SAID]),
        (
            {"problem": "Find x.", "answer": r"Answer: \boxed{5}"},
            {"answer_format": r"Answer: \boxed{{answer}}"},
            [ASKED, ("assistant", r"Answer: \boxed{5}")],
        ),
        (
            {"prompt": [USER], "reward_model": {"ground_truth": "5"}},
            {"answer_format": r"\boxed{{answer}}", "system_prompt": "Be brief.", "prompt_suffix": " Now."},
            [("system", "Be brief."), ("user", "Find x. Now."), ("assistant", r"\boxed{5}")],
        ),
        (
            {"messages": [USER, ASSISTANT, {"role": "user", "content": "Thanks."}]},
            {"prompt_suffix": " Now."},
            [("user", "Find x. Now."), SAID, ("user", "Thanks.")],
        ),
        ({"system_prompt": "", "system": None, "question": "Find x.", "response": "5"}, {}, [ASKED, SAID]),
        ({"system": "Be brief.", "prompt": "Find x.", "completion": "5"}, {"extra_columns": ()}, [ASKED, SAID]),
        (
            {"system": "Be brief.", "messages": [{"role": "system", "content": "Be brief."}, USER, ASSISTANT]},
            {},
            [("system", "Be brief."), ASKED, SAID],
        ),
    ],
    ids=str,
)
def test_published_forms_are_read(
    tmp_path: Path, row: dict[str, Any], settings: dict[str, Any], conversation: list[tuple[str, str]]
) -> None:
    """A conversation as it stands; else a prompt, of earlier turns too, and what follows it."""
    assert shown(first(tmp_path, row, **settings)) == conversation


def test_images_of_a_row_stand_at_their_marks(tmp_path: Path) -> None:
    """As in prompts; an answer that spells the mark keeps it as text."""
    (tmp_path / "a.png").write_bytes(png("red"))
    (tmp_path / "b.png").write_bytes(png("blue"))
    row = {"prompt": "<image>or<image>?", "completion": "The <image> is red.", "images": ["a.png", "b.png"]}
    found = first(tmp_path, row)
    assert shown(found) == [("user", "<0>or<1>?"), ("assistant", "The <image> is red.")]
    assert found.images == (png("red"), png("blue"))
    assert [part for part in found.messages[0].parts if isinstance(part, ImagePart)] == [
        ImagePart(index=0),
        ImagePart(index=1),
    ]


@pytest.mark.parametrize(
    ("row", "settings", "words"),
    [
        ({"messages": [USER]}, {}, r"no column completion or response .* with what the assistant says"),
        ({"prompt": "a", "completion": "b", "response": "c"}, {}, "completion and response could both hold"),
        (
            {"instruction": "Add.", "input": "2, 3", "output": "5"},
            {},
            r"instruction and input are one prompt together; join them into a column prompt, or choose one with "
            r"--data\.problem_column=instruction or --data\.problem_column=input",
        ),
        (
            {"instruction": "Add.", "input": "", "output": "5"},
            {"problem_column": "input"},
            "message 0, the user's, is empty",
        ),
        (
            {"system_prompt": "Be brief.", "question": "Find x.", "response": "5"},
            {},
            r"column 'system_prompt' holds a system message .*; make the prompt a list of messages that begins with "
            r"it, or leave all further columns out with --data\.extra_columns=\[\]",
        ),
        (
            {"system": "Be brief.", "conversations": [USER, ASSISTANT]},
            {"system_prompt": "Be kind."},
            "column 'system' holds a system message that would not be learned from",
        ),
        ({"messages": [ASSISTANT, USER]}, {}, "its assistant speaks before any user"),
        ({"messages": [{"role": "system", "content": "x"}, ASSISTANT]}, {}, "it has no user message"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, {}, "message 1, the assistant's, is empty"),
        (
            {"messages": [USER, {"role": "assistant", "content": "<image>"}], "images": ["a.png"]},
            {},
            "message 1, the assistant's, has an image; models answer with text",
        ),
        (
            {"messages": [USER, {**ASSISTANT, "reasoning_content": "2 + 3"}]},
            {},
            "column 'messages' holds message 1, the assistant's, with reasoning_content, which would not be learned",
        ),
        ({"prompt": "a", "completion": ""}, {}, "message 1, the assistant's, is empty"),
        ({"prompt": "a", "answer": 5}, {}, "column 'answer' holds int; .* set data.answer_format"),
        ({"prompt": "a", "answer": "x or y is 3"}, {"answer_column": "none"}, "has no column 'none'"),
        ({"prompt": "a", "answer": True}, {"answer_format": "{answer}"}, "column 'answer' holds true"),
    ],
    ids=str,
)
def test_rows_without_anything_to_learn_are_refused_in_one_line(
    tmp_path: Path, row: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    """File, row, what is wrong and the remedy."""
    (tmp_path / "a.png").write_bytes(png())
    with pytest.raises(DataError, match=words) as found:
        first(tmp_path, row, **settings)
    assert "rows.jsonl" in str(found.value)
    assert "\n" not in str(found.value)


def test_a_conversation_without_assistant_among_others_is_refused(tmp_path: Path) -> None:
    """The columns are those of the first row; a later one without an answer is named."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in ([USER, ASSISTANT], [USER])))
    source = open_sources(DataConfig(path=str(file)), form=DEMONSTRATIONS)[""]
    with pytest.raises(DataError, match=r"row 1: it has no assistant message, so there is nothing to learn; repair"):
        source[1]


def test_a_system_message_in_a_column_of_a_later_row_is_refused(tmp_path: Path) -> None:
    """Also where the rows that show a file's columns have none, or have it among their messages."""
    own = {"role": "system", "content": "Be brief."}
    rows: list[dict[str, Any]] = [{"system": None, "messages": [USER, ASSISTANT]}] * NUM_SHOWN_ROWS
    rows += [{"system": "Be brief.", "messages": messages} for messages in ([own, USER, ASSISTANT], [USER, ASSISTANT])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_sources(DataConfig(path=str(tmp_path / "rows.jsonl")), form=DEMONSTRATIONS)[""]
    assert shown(source[NUM_SHOWN_ROWS]) == [("system", "Be brief."), ASKED, SAID]
    with pytest.raises(DataError, match=rf"rows\.jsonl', row {NUM_SHOWN_ROWS + 1}: column 'system' holds"):
        source[NUM_SHOWN_ROWS + 1]


def test_the_whole_conversation_counts_against_the_limit(tmp_path: Path, tiny_model_path: Path) -> None:
    """Answers included: rows that exceed it are passed over and counted, and a source of nothing else is refused."""
    file = tmp_path / "rows.jsonl"
    answers = ["5", "5 and so on, at great length"]
    file.write_text("".join(json.dumps({"prompt": "Find x.", "completion": text}) + "\n" for text in answers))
    exact = ConversationLimit.load(tiny_model_path, max_tokens=10**6)
    config = DataConfig(path=str(file), shuffle=False, cache_dir=tmp_path / "cache")
    rows = open_sources(config, form=DEMONSTRATIONS)[""]
    short, long = exact.num_tokens(rows[0]), exact.num_tokens(rows[1])
    text = Renderer.load(tiny_model_path).render_text
    assert long - short == len(text(answers[1])) - len(text(answers[0])) > 0
    limit = ConversationLimit.load(tiny_model_path, max_tokens=short)
    dataset = open_dataset(config, limit=limit, form=DEMONSTRATIONS)
    assert isinstance(dataset.playable(0), Example)
    assert dataset.playable(1) == "overlong_prompt"
    assert dataset.num_passed_over() == 1
    with pytest.raises(DataError, match=rf"all 2 conversations are longer than the {short - 1} tokens .*sft\.max_tok"):
        open_dataset(config, limit=ConversationLimit.load(tiny_model_path, max_tokens=short - 1), form=DEMONSTRATIONS)


def test_budgets_of_episodes_bound_no_demonstration(tmp_path: Path, tiny_model_path: Path) -> None:
    """One recipe serves both kinds of training: what bounds a sample is sft.max_tokens."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Find x.", "completion": "5", "own": {"max_tokens": 3}}))
    settings: dict[str, Any] = {"limits": {"max_tokens": 2}, "limits_column": "own"}
    config = DataConfig(path=str(tmp_path / "rows.jsonl"), cache_dir=tmp_path / "cache", **settings)
    limit = ConversationLimit.load(tiny_model_path, max_tokens=1000)
    assert isinstance(open_dataset(config, limit=limit, form=DEMONSTRATIONS).playable(0), Example)


def test_an_answer_format_must_say_where_the_answer_stands(tmp_path: Path) -> None:
    """A recipe that would answer all rows alike is a mistake."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[data]\nanswer_format = "Answer"\n')
    with pytest.raises(ConfigError, match=r"data: answer_format = 'Answer' has no \{answer\}"):
        load(Recipe, [recipe])
