"""The harness of workers' and agents' own tests; packages that `make test-adapters` fetched are behind all others."""

import os
import sys
from pathlib import Path

from tests.integration.worker.conftest import (
    make_harness,
    make_recipe,
    pytest_collection_modifyitems,
    renderer,
    reward_address,
)

__all__ = ["make_harness", "make_recipe", "pytest_collection_modifyitems", "renderer", "reward_address"]

GYMS = Path(os.environ.get("PENSTOCK_TEST_CLIENTS", ".clients")).resolve() / "gyms"
if str(GYMS) not in sys.path:
    sys.path.append(str(GYMS))
