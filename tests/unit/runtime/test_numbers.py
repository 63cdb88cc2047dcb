"""Numbers of any library and size, as floats and in messages."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from penstock.runtime.numbers import finite_float, shown


@pytest.mark.parametrize(
    "value", [1, True, 0.5, np.float32(0.5), np.int64(3), Fraction(1, 4), Decimal("0.5"), torch.tensor(2)]
)
def test_numbers_of_libraries_are_floats(value: object) -> None:
    """Exactly floats: msgspec encodes no subclass."""
    found = finite_float(value)
    assert type(found) is float
    assert found == float(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", ["1", b"1", None, [1], math.nan, -math.inf, 10**400, Fraction(10**400), 1j, np.ones(2)], ids=str
)
def test_what_no_float_holds_is_none(value: object) -> None:
    """Of any kind."""
    assert finite_float(value) is None


def test_any_value_can_be_shown() -> None:
    """Also one with more digits than Python writes."""
    assert shown(10**400) == "an integer of 1329 bits"
    assert shown(Fraction(10**5000)) == "a Fraction of very many digits"
    assert (shown("1"), shown(math.nan)) == ("'1'", "nan")
