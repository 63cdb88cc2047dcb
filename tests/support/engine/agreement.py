"""What every run must show: engine and trainer compute the same log-probabilities where no version lies between."""

from collections.abc import Sequence
from typing import Any

from penstock.testing.tolerance import MAX_DLOGP


def require_agreement(rows: Sequence[dict[str, Any]]) -> None:
    """Some step of the run, whose metrics these are, had tokens of the current version, and they differ by rounding
    alone: no version stood for other weights."""
    differences = [row["dlogp_max_current"] for row in rows if "dlogp_max_current" in row]
    assert differences, "no step trained a token of the current version, so nothing was compared"
    assert max(differences) < MAX_DLOGP
