"""The end of a decoded response: the end-of-text tokens that trainers leave in it."""

import re

_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>", "<eos>")
"""The end-of-text tokens of Qwen, GPT-2, Llama and Gemma."""
_BACKWARDS = re.compile("|".join([r"(?:\s", *(re.escape(token[::-1]) for token in _TOKENS)]) + ")*+")
"""White space and these tokens spelt backwards, to strip the end of a text in linear time."""


def drop_end_of_text(text: str) -> str:
    """Return `text` without end-of-text tokens and white space at its end."""
    end = _BACKWARDS.match(text[::-1])
    return text[: len(text) - end.end()] if end else text
