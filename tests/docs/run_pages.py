"""`make test-docs`: each page does what it says, from its first block to its last."""

from pathlib import Path

import pytest

from tests.docs.pages import PAGES
from tests.docs.reader import Reader, copy_checkout
from tests.docs.steps import Page

pytestmark = pytest.mark.timeout(3600)


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_a_page_does_what_it_says(page: Page, tmp_path: Path) -> None:
    """Its commands end with 0 and print what it shows."""
    checkout = tmp_path / "penstock"
    copy_checkout(checkout)
    Reader(page, checkout).read()
