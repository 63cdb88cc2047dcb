"""Marks such as `<tool_call>` and the white space around them, in text that comes in pieces. Pure."""


def held_back(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(mark[:count])), 0)


class SpaceHolder:
    """Passes text on without the white space that a mark may follow, and without white space that follows a mark."""

    def __init__(self, *, is_after_mark: bool) -> None:
        """Nothing was passed on yet."""
        self._held: list[str] = []
        self._is_after_mark = is_after_mark

    def add(self, text: str) -> str:
        """Take more text; return what is certain."""
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
        """Drop what is held, and the white space that follows."""
        self._held, self._is_after_mark = [], True

    def take(self) -> str:
        """The white space that turned out to have no mark behind it."""
        held, self._held, self._is_after_mark = "".join(self._held), [], False
        return held
