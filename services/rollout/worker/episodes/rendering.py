"""Renders observations without blocking the event loop.

Invariants: short texts are rendered at once; a long text is rendered in a thread, by the thread's own renderer, because
two threads must not share a tokenizer. Tokenizers let other threads run while they work. Short texts never wait for
long ones.
"""

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from penstock.model.chat.chat_template import Renderer

LONG_TEXT_BYTES = 32 * 2**10
"""About ten milliseconds of rendering; longer texts go to the thread."""


class Rendering:
    """A renderer for the event loop, and a copy of it for long texts."""

    def __init__(self, renderer: Renderer) -> None:
        """Render with `renderer`, which is copied for the first long text."""
        self._renderer = renderer
        self._of_thread: Renderer | None = None
        self._executor = ThreadPoolExecutor(max_workers=1)

    async def render(self, render: Callable[[Renderer], list[int]], *, num_bytes: int) -> list[int]:
        """Return the ids that `render` makes of a text of `num_bytes`, with the renderer that it is given.

        Raises: as `render` does.
        """
        if num_bytes <= LONG_TEXT_BYTES:
            return render(self._renderer)
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._render_in_thread, render)

    def _render_in_thread(self, render: Callable[[Renderer], list[int]]) -> list[int]:
        if self._of_thread is None:
            self._of_thread = copy.deepcopy(self._renderer)
        return render(self._of_thread)
