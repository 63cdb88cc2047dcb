"""Decodes token ids to text one at a time, for byte-level BPE tokenizers (Qwen, Llama 3, GPT). Pure.

A character may span several tokens. Invariant: emitted text is never taken back, and U+FFFD stands only for bytes that
are not UTF-8, so the pieces together are the text of all ids.
"""

import codecs
from collections.abc import Collection, Mapping


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


def _byte_of() -> dict[str, int]:
    """Return the alphabet of byte-level BPE (GPT-2): printable characters as themselves, the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}
