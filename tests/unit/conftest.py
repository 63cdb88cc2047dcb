"""What several unit tests share."""

from pathlib import Path

import pytest

from penstock.model.chat.chat_template import Renderer


@pytest.fixture(scope="module")
def renderer(tiny_model_path: Path) -> Renderer:
    """The tiny model's renderer."""
    return Renderer.load(tiny_model_path)
