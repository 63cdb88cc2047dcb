"""What a verifier of one's own may return."""

from typing import Any

import numpy as np
import pytest

from services.reward.worker_tasks.custom_verifier import _BadReturnError, _read


@pytest.mark.parametrize(
    ("returned", "credit"),
    [
        (True, 1.0),
        (0.25, 0.25),
        (np.isclose(1.0, 1.0), 1.0),
        (np.float32(0.5), 0.5),
        (np.array(1), 1.0),
        ({"credit": np.bool_(False)}, 0.0),
    ],
)
def test_a_number_or_a_bool_also_numpys(returned: Any, credit: float) -> None:
    """A comparison of numpy is the usual last line of a numeric verifier."""
    assert _read(returned) == (credit, "")


@pytest.mark.parametrize("returned", [np.array([1, 0]), np.float64("nan"), 2, "1", None])
def test_anything_else_is_told(returned: Any) -> None:
    """It is none of the item's fault, and no credit."""
    with pytest.raises(_BadReturnError, match="return a number from 0 to 1"):
        _read(returned)
