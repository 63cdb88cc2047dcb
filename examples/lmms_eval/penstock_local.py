"""What penstock_local.yaml refers to: how a row is asked, and how an answer is scored."""

import base64
import io
import re
from typing import Any

from PIL import Image

_BOX = re.compile(r"\\boxed\{([^{}]*)\}")


def to_visual(row: dict[str, Any]) -> list[Image.Image]:
    """The row's picture, if it has one."""
    return [Image.open(io.BytesIO(base64.b64decode(row["image"]))).convert("RGB")] if row.get("image") else []


def to_text(row: dict[str, Any], lmms_eval_specific_kwargs: dict[str, Any] | None = None) -> str:
    """The question, without the mark that stands for the picture."""
    return str(row["problem"]).replace("<image>", "").strip()


def score(row: dict[str, Any], results: list[str]) -> dict[str, float]:
    """1 if the last box holds the answer as it is written."""
    boxes = _BOX.findall(results[0])
    return {"exact_box": float(bool(boxes) and boxes[-1].strip() == str(row["answer"]).strip())}
