"""Two runs, a server that shows them and Debian's Chromium.

Playwright is imported where it is used: only `make test-browser` fetches it.
"""

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.view_runs import make_run, step_row, write_rows

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

_CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> "AsyncIterator[Browser]":
    """Debian's Chromium, which has temporary files from time to time, so not where tests may leave none."""
    from playwright.async_api import async_playwright

    environment = os.environ | {"TMPDIR": str(tmp_path_factory.mktemp("chromium"))}
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=_CHROMIUM, args=list(_ARGUMENTS), env={**environment}
        )
        yield browser
        await browser.close()


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs; the second has a fault."""
    folders = [make_run(tmp_path / "first"), make_run(tmp_path / "second", max_staleness=2)]
    write_rows(
        folders[1],
        [step_row(step, num_failed_groups=step, trainer_start=2, trainer_deaths=1) for step in range(31, 36)],
    )
    return folders


@pytest.fixture
async def url(runs: list[Path]) -> AsyncIterator[str]:
    """Address of a server that shows them, with the token."""
    from tests.browser.pages import served

    async with served(runs) as url:
        yield url


@pytest.fixture
async def page(browser: "Browser", url: str) -> "AsyncIterator[Page]":
    """The first page, opened."""
    from tests.browser.pages import opened

    async with opened(browser, url) as page:
        yield page
