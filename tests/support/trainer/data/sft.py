"""Demonstrations for tests."""

from collections.abc import Sequence
from pathlib import Path

from services.trainer.data.config import DataConfig
from services.trainer.data.rows.columns import Columns
from services.trainer.data.rows.example import Example, make_demonstration
from services.trainer.data.rows.images import ImageReader


def demonstration(*texts: str, images: Sequence[bytes] = ()) -> Example:
    """A conversation in which user and assistant take turns, with images at its `<image>`."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return make_demonstration(
        {"messages": messages, "images": list(images)},
        Columns(text="messages", gold="", images=("images",)),
        DataConfig(),
        ImageReader(folder=Path()),
    )
