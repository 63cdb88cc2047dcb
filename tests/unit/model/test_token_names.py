"""Names of tokens, for people to read."""

from pathlib import Path

import numpy as np

from penstock.model.chat.chat_template import Renderer
from penstock.model.detokenize import TokenTexts

MODEL = Path(__file__).parents[3] / "models" / "tiny-qwen3-vl"


def byte_names(data: bytes) -> list[str]:
    """Names of ids that are bytes, in a vocabulary of nothing else but one special token."""
    others = [*range(33), *range(127, 161), 173]
    vocab = {chr(256 + others.index(byte)) if byte in others else chr(byte): byte for byte in range(256)}
    texts = TokenTexts({**vocab, "<|end|>": 256}, added={256: "<|end|>"}, special_ids=[256])
    return texts.names_of(np.array([*data, 256], dtype=np.int32))


def test_a_character_of_several_tokens_belongs_to_the_first() -> None:
    """So there is one name for each token, and joined they are the whole text; special tokens are spelled."""
    names = byte_names("a→é😀!".encode())
    assert names == ["a", "→", "", "", "é", "", "😀", "", "", "", "!", "<|end|>"]


def test_bytes_that_are_no_character_stay_apart() -> None:
    """A policy may sample anything, also the middle of a character."""
    assert byte_names(b"\x9fb\xf0\x9f") == ["\ufffd", "b", "\ufffd", "\ufffd", "<|end|>"]


def test_ids_that_are_not_in_the_vocabulary_have_no_name() -> None:
    """Engines may sample ids of the padding of their output layer; such an id also ends what others spell."""
    texts = TokenTexts({"a": 0, "Ã": 1, "©": 2}, added={}, special_ids=[])
    assert texts.names_of(np.array([0, 3, 1, 2, 1, 7, 2, -1, 2**31 - 1], dtype=np.int32)) == [
        *("a", "", "é", "", "\ufffd", "", "\ufffd", "", "")
    ]
    assert texts.names_of(np.zeros(0, dtype=np.int32)) == []


def test_names_of_a_real_tokenizer_join_to_the_text() -> None:
    """Special tokens and spaces included."""
    from transformers import AutoTokenizer

    text = "<|im_start|>user\n 3 + 4 = 7?\n<|im_end|> naïve 😀"
    ids = AutoTokenizer.from_pretrained(MODEL)(text)["input_ids"]
    names = Renderer.load(MODEL).token_texts().names_of(np.array(ids, dtype=np.int32))
    assert len(names) == len(ids)
    assert "".join(names) == text
