"""What the keeper of a connection sees of one that is being closed."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.bus.cluster.keeper import _bytes_of_closing


class Transport:
    """One that is closing, or not."""

    def __init__(self, *, is_closing: bool, num_bytes: int | None) -> None:
        self._is_closing = is_closing
        self._num_bytes = num_bytes

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        if self._num_bytes is None:
            raise AttributeError("'NoneType' object has no attribute '_get_write_buffer_size'")
        return self._num_bytes


@pytest.mark.parametrize(
    ("is_closing", "num_bytes", "expected"), [(False, 9, 0), (True, 9, 9), (True, 0, 0), (True, None, 0)]
)
def test_only_what_a_closing_connection_wants_to_send_counts(
    is_closing: bool, num_bytes: int | None, expected: int
) -> None:
    """asyncio's connections with TLS, once closed, no longer know: the keeper goes on all the same."""
    transport = Transport(is_closing=is_closing, num_bytes=num_bytes)
    client: Any = SimpleNamespace(_transport=SimpleNamespace(_io_writer=SimpleNamespace(transport=transport)))
    assert _bytes_of_closing(client) == expected
    assert _bytes_of_closing(SimpleNamespace(_transport=None)) == 0  # type: ignore[arg-type]
