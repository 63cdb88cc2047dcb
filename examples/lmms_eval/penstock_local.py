"""What penstock_local.yaml refers to: how a row is asked, and how an answer is scored."""

import base64
import io
import re
from typing import Any

from PIL import Image

_BOX = r"\boxed{"
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or a backslash with what it escapes."""


def to_visual(row: dict[str, Any]) -> list[Image.Image]:
    """The row's picture, if it has one."""
    return [Image.open(io.BytesIO(base64.b64decode(row["image"]))).convert("RGB")] if row.get("image") else []


def to_text(row: dict[str, Any], lmms_eval_specific_kwargs: dict[str, Any] | None = None) -> str:
    """The question, without the mark that stands for the picture."""
    return str(row["problem"]).replace("<image>", "").strip()


def score(row: dict[str, Any], results: list[str]) -> dict[str, float]:
    """1 if the last box holds the answer as it is written."""
    return {"exact_box": float(_last_box(results[0]) == str(row["answer"]).strip())}


def _last_box(text: str) -> str | None:
    """What the last box holds, with the braces inside it; None without a box, or if the last one never closes."""
    _, box, rest = text.rpartition(_BOX)
    if not box:
        return None
    depth = 1
    for mark in _BRACE.finditer(rest):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return rest[: mark.start()].strip()
    return None
