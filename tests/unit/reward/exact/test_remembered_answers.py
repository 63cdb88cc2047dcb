"""What is kept of the answers that were read: ordinary ones, within a bound in bytes."""

import gc
import tracemalloc
from collections.abc import Callable

import pytest

from services.reward.exact.comparison import Side

_NUM_REMEMBERED = 4096
_MAX_BYTES = 64 * 2**20


@pytest.mark.parametrize(
    "text", ["12", r"3 \sqrt { 2 }", r"12\text{ cm}", r"45^\circ", "x = 5", "x^2+2x+1", "(3, 4)", "5:7", "B", "yes"]
)
def test_ordinary_answers_are_read_once(text: str) -> None:
    """A gold answer comes with each response of its group."""
    assert Side.of(text) is Side.of(text)


@pytest.mark.parametrize(
    "hostile",
    [
        lambda number: rf"(9^64)^{{40}}(a+b)^{{31}}/(7^64)^{{45}}*{number}",
        lambda number: f"AB = (9^64)^40(a+b+c)^6/(7^64)^45*{number}",
        lambda number: f"(9^64)^40(a+b)^31*{number}, (9^64)^40(a+c)^31",
        lambda number: f"B. (9^64)^40(a+b)^31*{number}",
        lambda number: f"x < (9^64)^40*{number}\\pi + 3",
        lambda number: f"(9^64)^40(a+b)^31 = {number}",
        lambda number: f"(a+b)(c+d)(f+g)(h+j)(k+l){number}",
        lambda number: ",".join(str(number + each) for each in range(30)),
        lambda number: f"{number}" + ",1" * 21,
        lambda number: f"{number}=" + "ab=" * 13 + "a",
        lambda number: f"x={number}," + ",".join("abcdefghijklmnopqrst"),
    ],
)
def test_hostile_answers_take_little_memory(hostile: Callable[[int], str]) -> None:
    """All that may be kept takes at most 64 MiB, though a short text can have a value of 80 kB."""
    texts = [hostile(number) for number in range(1001, 1018)]
    Side.of(texts.pop())
    gc.collect()
    tracemalloc.start()
    for text in texts:
        Side.of(text)
    gc.collect()
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes / len(texts) * _NUM_REMEMBERED < _MAX_BYTES


def test_the_oldest_answers_are_forgotten() -> None:
    """Their number is bounded too. Other tests have read at most half of these answers."""
    first = Side.of("17.25")
    for number in range(2 * _NUM_REMEMBERED):
        Side.of(f"17.{number}1")
    assert Side.of("17.25") is not first
