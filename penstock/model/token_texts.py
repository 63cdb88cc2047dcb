"""Text of single tokens, for people to read."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

_BROKEN = "\ufffd"
_MAX_TOKENS = 8
"""Tokens of the longest character; byte-level vocabularies need at most four, and one more for a space before it."""


class TokenTexts:
    """Texts of tokens. A character of several tokens belongs to the first of them."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """Decode ids with `decode`, which must keep special tokens and spaces."""
        self._decode = decode
        self._known: dict[int, str] = {}

    @classmethod
    def of_model(cls, model_path: Path) -> Self:
        """Use the tokenizer of a model folder, which is read when the first text is asked for."""
        loaded: list[Any] = []

        def decode(ids: list[int]) -> str:
            if not loaded:
                from transformers import AutoTokenizer

                loaded.append(AutoTokenizer.from_pretrained(str(model_path), local_files_only=True))
            text: str = loaded[0].decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            return text

        return cls(decode)

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token; joined, they are the text of all."""
        texts = [self._text(token) for token in ids]
        index = 0
        while index < len(texts):
            if _BROKEN in texts[index]:
                index = self._mend(ids, texts, index)
            else:
                index += 1
        return texts

    def _text(self, token: int) -> str:
        text = self._known.get(token)
        if text is None:
            text = self._known[token] = self._decode([token])
        return text

    def _mend(self, ids: Sequence[int], texts: list[str], start: int) -> int:
        """Join the tokens from `start` that make whole characters; return the index after them."""
        for stop in range(start + 2, min(start + _MAX_TOKENS, len(ids)) + 1):
            whole = self._decode(list(ids[start:stop]))
            if _BROKEN not in whole:
                texts[start:stop] = [whole, *[""] * (stop - start - 1)]
                return stop
        return start + 1
