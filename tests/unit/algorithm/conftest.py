"""The batch that the tests of steps share."""

from pathlib import Path

import pytest

from services.trainer.batching.sequences import TrainGroup
from tests.support.trainer.steps import four_groups


@pytest.fixture(scope="package")
def groups(tiny_model_path: Path) -> list[TrainGroup]:
    """As `four_groups` describes them."""
    return four_groups(tiny_model_path)
