"""`penstock view` and its first page, opened in a browser."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from playwright.async_api import Browser, Page, expect

from penstock.http.server import HttpServer
from penstock.runtime.security import Security
from services.view.app import view_app
from services.view.run_reader import RunReader
from services.view.sign_in import SignIn

LONGEST_CLICKS = 3
SCRIPT = "<script>document.title = 'broken'</script><img src=x onerror=\"document.title = 'broken'\">"
"""What a policy may write, and no page may run."""


@asynccontextmanager
async def served(runs: list[Path]) -> AsyncIterator[str]:
    """Show runs, and yield the address with the token."""
    app = view_app([RunReader(folder) for folder in runs])
    server = HttpServer(app, host="127.0.0.1", port=0, security=Security(token="secret"), wrap=SignIn)
    await server.start()
    try:
        yield f"{server.url}/?token=secret"
    finally:
        await server.drain(1.0)


@asynccontextmanager
async def opened(browser: Browser, url: str, *, own: str = "http://127.0.0.1:") -> AsyncIterator[Page]:
    """Open the first page; no error and no request to other addresses than `own` may happen on it."""
    context = await browser.new_context(viewport={"width": 1280, "height": 800})
    page = await context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: None if request.url.startswith((own, "data:")) else wrong.append(request.url))
    await page.goto(url)
    await expect(page.locator("h1")).to_have_text("Curves", timeout=30_000)  # a busy machine's first answers
    await page.evaluate("() => { window.clicks = 0; addEventListener('click', () => { clicks += 1; }, true); }")
    yield page
    await context.close()
    assert wrong == []


async def num_clicks(page: Page) -> int:
    """Clicks since the page was opened."""
    found: int = await page.evaluate("clicks")
    return found
