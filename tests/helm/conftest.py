"""The objects of releases, for all tests of the chart. `make test` reads this file too, without Helm."""

from typing import Any

import pytest

from tests.helm.cases import CASES


@pytest.fixture(params=CASES, scope="module")
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The objects of a release."""
    from tests.helm.chart import render

    return render(CASES[request.param])
