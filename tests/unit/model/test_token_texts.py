"""Texts of single tokens."""

from pathlib import Path

from penstock.model.token_texts import TokenTexts

MODEL = Path(__file__).parents[3] / "models" / "tiny-qwen3-vl"


def byte_texts() -> TokenTexts:
    """Every id is a byte."""
    return TokenTexts(lambda ids: bytes(ids).decode(errors="replace"))


def test_a_character_of_several_tokens_belongs_to_the_first() -> None:
    """So texts have one entry for each token and join to the whole text."""
    ids = list("a→é😀!".encode())
    texts = byte_texts()(ids)
    assert texts == ["a", "→", "", "", "é", "", "😀", "", "", "", "!"]


def test_bytes_that_are_no_character_stay_apart() -> None:
    """A policy may sample anything, also the middle of a character."""
    texts = byte_texts()([0x9F, ord("b"), 0xF0, 0x9F])
    assert texts == ["\ufffd", "b", "\ufffd", "\ufffd"]


def test_texts_of_a_real_tokenizer_join_to_the_text() -> None:
    """Special tokens and spaces included."""
    from transformers import AutoTokenizer

    text = "<|im_start|>user\n 3 + 4 = 7?\n<|im_end|> naïve 😀"
    ids = AutoTokenizer.from_pretrained(MODEL)(text)["input_ids"]
    texts = TokenTexts.of_model(MODEL)(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text
