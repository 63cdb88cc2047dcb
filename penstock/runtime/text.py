"""Text that can be sent: what UTF-8 cannot encode is replaced."""

import re

_SURROGATE = re.compile("[\ud800-\udfff]")


def printable(text: str) -> str:
    """Return the text with each lone surrogate, as JSON's escapes can spell, replaced by U+FFFD."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)
