"""Examples that are read again soon are read from their file once."""

import pytest

from penstock.errors import DataError
from penstock.records import Message, TextPart
from services.trainer.data.recent_examples import RecentExamples
from services.trainer.data.rows.example import Example


class Rows:
    """Counts what is read of them."""

    def __init__(self, image_bytes: int = 0, characters: int = 1) -> None:
        self.num_read = 0
        self._image_bytes = image_bytes
        self._text = "x" * characters

    def read(self, row: int) -> Example:
        self.num_read += 1
        return Example(
            messages=(Message(role="user", parts=(TextPart(text=self._text),)),),
            images=(bytes(self._image_bytes),),
            golds=(str(row),),
            profile="math",
            environment="single_turn",
        )


def test_an_example_is_read_once() -> None:
    """Rows of another source are others."""
    rows, recent = Rows(), RecentExamples()
    first = recent.read("a", 3, rows.read)
    assert recent.read("a", 3, rows.read) is first
    assert recent.read("b", 3, rows.read) is not first
    assert rows.num_read == 2


def test_long_texts_count() -> None:
    """Four bytes a character, for a text with one emoji takes as many."""
    rows, recent = Rows(characters=1 << 18), RecentExamples(max_bytes=3 << 20)
    for row in (0, 1, 2, 2, 1, 0):
        recent.read("a", row, rows.read)
    assert rows.num_read == 4


def test_those_that_were_asked_for_last_are_kept() -> None:
    """As many as their images have room for; one that is larger alone is not kept."""
    rows, recent = Rows(image_bytes=1 << 20), RecentExamples(max_bytes=3 << 20)
    for row in (0, 1, 0, 2):
        recent.read("a", row, rows.read)
    assert rows.num_read == 3
    recent.read("a", 0, rows.read)
    assert rows.num_read == 3
    recent.read("a", 1, rows.read)
    assert rows.num_read == 4
    large = Rows(image_bytes=4 << 20)
    for _ in range(2):
        assert recent.read("large", 0, large.read).golds == ("0",)
    assert large.num_read == 2


def test_a_wrong_row_is_read_again() -> None:
    """It may have been repaired."""
    rows, recent = Rows(), RecentExamples()

    def fail(row: int) -> Example:
        raise DataError("wrong")

    with pytest.raises(DataError):
        recent.read("a", 0, fail)
    assert recent.read("a", 0, rows.read).golds == ("0",)
