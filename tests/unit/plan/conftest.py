"""What several tests of `penstock plan` share."""

import pytest

from services.plan import working_memory


@pytest.fixture
def computed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are computed with all of their layers, at once, instead of thrice with a few."""
    monkeypatch.setattr(working_memory, "NUM_LAYERS", 6)
    monkeypatch.setattr(working_memory, "NUM_BLOCKS", 7)
