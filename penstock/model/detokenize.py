"""Ids to text while they come, for tokenizers that are byte-level BPE (Qwen, Llama 3, GPT). Pure.

A character may be spread over several tokens. Invariant: what was told is never taken back, and U+FFFD stands only for
bytes that are no UTF-8, so that the pieces together are the text of all ids.
"""

import codecs
from collections.abc import Collection, Mapping


class TokenTexts:
    """What each id of a vocabulary says."""

    def __init__(self, vocab: Mapping[str, int], *, added: Mapping[int, str], special_ids: Collection[int]) -> None:
        """Read a vocabulary.

        Args:
            vocab: Each token, in the alphabet of byte-level BPE, and its id.
            added: Tokens that stand for themselves, by id; also in `vocab`.
            special_ids: Those of them that only mark something: they say nothing.
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
        """Size of the longest token."""
        return max(map(len, self._bytes.values()), default=1)

    def bytes_of(self, number: int) -> bytes:
        """What the id says, in UTF-8 of which it may hold parts; nothing where it is unknown or special."""
        return self._bytes.get(number, b"")

    def name_of(self, number: int) -> str:
        """What people call the id: its text, or the spelling of a special one."""
        return self._special.get(number) or self.bytes_of(number).decode(errors="replace")


class TextStream:
    """The text of one answer."""

    def __init__(self, texts: TokenTexts) -> None:
        """Nothing was said yet."""
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, number: int) -> str:
        """The characters that are complete with this id."""
        return self._decoder.decode(self._texts.bytes_of(number))

    def finish(self) -> str:
        """What an answer that ends within a character leaves: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)


def _byte_of() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2): printable characters are themselves, the others follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
