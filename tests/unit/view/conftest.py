"""The scripts of the pages."""

import pytest

from tests.support.view_scripts import ViewScripts


@pytest.fixture(scope="module")
def scripts() -> ViewScripts:
    """Those of a page that a server serves."""
    return ViewScripts()
