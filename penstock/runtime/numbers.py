"""Numbers as other people's code returns them: of any library, and of any size."""

import math


def finite_float(value: object) -> float | None:
    """Return a number as a float; None if it is no number, or none that a float can hold. A truth value is 1 or 0."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):  # an integer may have hundreds of digits
        return None
    return number if math.isfinite(number) else None


def shown(value: object) -> str:
    """Return a value for a message, however many digits it has."""
    if isinstance(value, int) and value.bit_length() > 1_000:
        return f"an integer of {value.bit_length()} bits"
    try:
        return repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return f"a {type(value).__name__} of very many digits"
