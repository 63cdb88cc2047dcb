"""Decodes token ids to text one at a time, for byte-level BPE tokenizers (Qwen, Llama 3, GPT). Pure.

A character may span several tokens. Invariant: emitted text is never taken back, and U+FFFD stands only for bytes that
are not UTF-8, so the pieces together are the text of all ids.
"""

import codecs
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import numpy as np

_MAX_PARTS = 8
"""Ids that may spell one character, or a few, together; UTF-8 needs at most four bytes for one."""


class TokenTexts:
    """The text of each id of a vocabulary."""

    def __init__(self, vocab: Mapping[str, int], *, added: Mapping[int, str], special_ids: Collection[int]) -> None:
        """Read a vocabulary.

        Args:
            vocab: Each token, in the alphabet of byte-level BPE, and its id.
            added: Tokens that stand for themselves, by id; also in `vocab`.
            special_ids: The ids among them that are special tokens, which have no text.
        """
        byte_of = _byte_of()
        self._bytes = {
            number: bytes(map(byte_of.__getitem__, token)) for token, number in vocab.items() if number not in added
        }
        self._bytes |= {number: text.encode() for number, text in added.items()}
        self._special = {number: added.get(number, "") for number in special_ids}
        self._bytes |= dict.fromkeys(special_ids, b"")

    @property
    def longest_bytes(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self._bytes.values()), default=1)

    def bytes_of(self, number: int) -> bytes:
        """Return the id's bytes of UTF-8 text, perhaps part of a character; empty for a special or unknown id."""
        return self._bytes.get(number, b"")

    def name_of(self, number: int) -> str:
        """Return the id's text, or the spelling of a special token, to show to people."""
        return self._special.get(number) or self.bytes_of(number).decode(errors="replace")

    def names_of(self, ids: np.ndarray) -> list[str]:
        """Return `name_of` each id; a character that several ids spell is the name of the first of them.

        Args:
            ids: int32[T]. The first call takes a while: it names the whole vocabulary.
        """
        names_V, is_part_V = self._named
        places = ids.astype(np.uint32)  # an id that is not in the vocabulary is one behind it
        names: list[str] = names_V.take(places, mode="clip").tolist()
        is_part = is_part_V.take(places, mode="clip")
        if np.count_nonzero(is_part):
            self._join_parts(ids.tolist(), np.flatnonzero(is_part).tolist(), names)
        return names

    @cached_property
    def _named(self) -> tuple[np.ndarray, np.ndarray]:
        """Names of all ids, and whether each spells no whole characters; the last entry is for ids that do not
        exist."""
        size = max(self._bytes, default=-1) + 2
        names_V, is_part_V = np.full(size, "", dtype=object), np.zeros(size, dtype=np.bool_)
        for number in self._bytes:
            names_V[number] = self.name_of(number)
            is_part_V[number] = _text(self.bytes_of(number)) is None
        return names_V, is_part_V

    def _join_parts(self, ids: Sequence[int], parts: Sequence[int], names: list[str]) -> None:
        """Name the ids that are no whole characters, whose places are `parts`."""
        stop = 0
        for start in parts:
            if start >= stop:
                stop = start + self._join(ids, names, start)

    def _join(self, ids: Sequence[int], names: list[str], start: int) -> int:
        """Name the ids from `start` on that spell whole characters together; return how many, 1 if they spell none."""
        spelled = b""
        for count, number in enumerate(ids[start : start + _MAX_PARTS], start=1):
            part = self.bytes_of(number)
            if _text(part) is not None:
                break
            spelled += part
            if (text := _text(spelled)) is not None:
                names[start : start + count] = [text, *[""] * (count - 1)]
                return count
        return 1


class IncrementalDetokenizer:
    """Turns the ids of one answer into text."""

    def __init__(self, texts: TokenTexts) -> None:
        """Start with no text."""
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, number: int) -> str:
        """Add an id and return the characters that it completes."""
        return self._decoder.decode(self._texts.bytes_of(number))

    def finish(self) -> str:
        """Return the rest of the text: U+FFFD if the answer ends inside a character, else empty."""
        return self._decoder.decode(b"", final=True)


def _text(data: bytes) -> str | None:
    """Return UTF-8 text; None if the bytes are not whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _byte_of() -> dict[str, int]:
    """Return the alphabet of byte-level BPE (GPT-2): printable characters as themselves, the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}
