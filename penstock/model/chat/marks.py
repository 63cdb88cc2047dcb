"""Marks such as `<tool_call>` and the white space around them, in text that arrives in pieces. Pure."""


def held_back(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(mark[:count])), 0)


class SpaceHolder:
    """Passes text on, without the white space before and after marks."""

    def __init__(self, *, is_after_mark: bool) -> None:
        """Start with no text; `is_after_mark`: drop white space at the start."""
        self._held: list[str] = []
        self._is_after_mark = is_after_mark

    def add(self, text: str) -> str:
        """Add text; return the part that is final."""
        kept = text.rstrip()
        if not kept:
            if text and not self._is_after_mark:
                self._held.append(text)
            return ""
        emitted = kept.lstrip() if self._is_after_mark else f"{self.take()}{kept}"
        self._is_after_mark = False
        if len(kept) < len(text):
            self._held.append(text[len(kept) :])
        return emitted

    def meet_mark(self) -> None:
        """Drop the held white space, and the white space that follows."""
        self._held, self._is_after_mark = [], True

    def take(self) -> str:
        """Return the held white space, which no mark follows."""
        held, self._held, self._is_after_mark = "".join(self._held), [], False
        return held
