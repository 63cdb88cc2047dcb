"""Names the tokens of a model for people."""

import functools
from pathlib import Path

from penstock.model.chat.chat_template import Renderer
from penstock.model.detokenize import TokenTexts
from services.trainer.telemetry.episodes.description import TokenNames


def token_names(model_path: Path) -> TokenNames:
    """Return what names the tokens of the model in a folder; its tokenizer is read when the first ones are named."""

    @functools.cache
    def read_texts() -> TokenTexts:
        return Renderer.load(model_path).token_texts()

    return lambda ids: read_texts().names_of(ids)
