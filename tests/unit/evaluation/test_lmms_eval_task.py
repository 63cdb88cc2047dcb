"""The task for lmms-eval in examples/lmms_eval, without lmms-eval: what it asks, and how it scores."""

import base64
import importlib.util
import io
import re
from pathlib import Path
from typing import Any

import pytest

from services.router.frontends.openai.schema.requests import ChatRequest
from tests.support.trainer.data.pictures import png

FOLDER = Path(__file__).parents[3] / "examples/lmms_eval"


@pytest.fixture(scope="module")
def task() -> Any:
    """The module that the task's file refers to."""
    spec = importlib.util.spec_from_file_location("penstock_local", FOLDER / "penstock_local.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_task_names_functions_that_there_are(task: Any) -> None:
    """lmms-eval finds them by module and name."""
    named = re.findall(r"!function (\w+)\.(\w+)", (FOLDER / "penstock_local.yaml").read_text())
    assert {module for module, _ in named} == {"penstock_local"}
    assert all(callable(getattr(task, name)) for _, name in named)


def test_what_lmms_eval_sends_is_taken(task: Any) -> None:
    """Pictures before the text, as PNG in data URIs; model, max_tokens and temperature, and nothing else."""
    row = {"problem": "<image>Find x.", "answer": "3", "image": base64.b64encode(png(size=(64, 48))).decode()}
    [picture] = task.to_visual(row)
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    request = ChatRequest.model_validate(
        {
            "model": "policy",
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": url}},
                        {"type": "text", "text": task.to_text(row)},
                    ],
                }
            ],
            "max_tokens": 64,
            "temperature": 0,
        }
    )
    assert (request.temperature, request.max_tokens) == (0, 64)
    assert task.to_text(row) == "Find x."
    assert picture.size == (64, 48)
    assert task.to_visual({"problem": "2 + 2?", "answer": "4", "image": ""}) == []


@pytest.mark.parametrize(
    ("text", "value"),
    [(r"so \boxed{3}", 1.0), (r"\boxed{4} no, \boxed{ 3 }", 1.0), (r"\boxed{3} \boxed{4}", 0), ("3", 0), ("3}", 0)],
)
def test_the_last_box_is_scored(task: Any, text: str, value: float) -> None:
    """As it is written."""
    assert task.score({"answer": "3"}, [text]) == {"exact_box": value}


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        (r"\boxed{3\sqrt{2}}", r"3\sqrt{2}", 1.0),
        (r"\boxed{\frac{\sqrt{2}}{2}}.", r"\frac{\sqrt{2}}{2}", 1.0),
        (r"\boxed{x = \left\{ 1 \right.}", r"x = \left\{ 1 \right.", 1.0),
        (r"\boxed{3} no, \boxed{3\sqrt{2}}", "3", 0.0),
        (r"\boxed{3} no, \boxed{4", "3", 0.0),
        (r"\boxed{\sqrt{2}", r"\sqrt{2", 0.0),
    ],
)
def test_a_box_ends_at_the_brace_that_closes_it(task: Any, text: str, answer: str, value: float) -> None:
    """A box that is never closed holds nothing, and hides those before it."""
    assert task.score({"answer": answer}, [text]) == {"exact_box": value}
