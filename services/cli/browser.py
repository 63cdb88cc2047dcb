"""Opens a page for a person who sits at this machine."""

import os
import sys
import webbrowser


def has_person() -> bool:
    """Return whether standard output is a terminal, and this process has a display."""
    has_display = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    return has_display and sys.stdout.isatty()


def open_page(url: str) -> bool:
    """Open `url` in a browser with a window of its own, and return whether there was one. May block for seconds."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    # What needs a terminal, such as lynx, would take the one that this process writes to.
    return type(browser) is not webbrowser.GenericBrowser and browser.open(url)
