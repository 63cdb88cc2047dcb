"""Finds words in what kept groups say: in the index where that has all of it, otherwise in their descriptions."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from services.view.episode_query import Found

BUDGET_S: Final = 1.5
"""Seconds of one search, after which it says how many groups are left; asked again, it goes on with these."""
_MOST_KEPT: Final = 8
"""Searches whose results are kept."""
_CUT: Final = "…"
"""Ends a text that the index has not all of; see `services.trainer.telemetry.episodes.description`."""

Entry = Mapping[str, Any]


class _Said(msgspec.Struct):
    """A message, or a sample."""

    content: str = ""
    text: str = ""


class _Group(msgspec.Struct):
    """What a description has of texts."""

    messages: list[_Said] = []
    samples: list[_Said] = []


_decoder: Final = msgspec.json.Decoder(_Group)


class TextSearch:
    """The searches in one run. It may be used from several threads."""

    def __init__(self, read: Callable[[Entry], bytes | None]) -> None:
        """Search in what `read` returns for an entry of the index: its description, None if that is gone."""
        self._read = read
        self._lock = threading.Lock()
        self._results: dict[tuple[str, ...], dict[tuple[Any, ...], bool]] = {}

    def run(
        self, index: Sequence[Entry], places: Sequence[int], words: Sequence[str], *, budget_s: float = BUDGET_S
    ) -> Found:
        """Return which groups have all of the words, in the order of `places`.

        Args:
            index: All entries.
            places: Places in it of the groups to search, in the order in which they are searched.
            words: Casefolded.
            budget_s: Seconds that it may take; one description is read in any case.
        """
        results = self._results_of(tuple(sorted(words)))
        found, num_left, ends_at = [], 0, float("inf")
        for place in places:
            entry = index[place]
            text = _text_of(entry)
            if _has(text, words):
                found.append(place)
                continue
            if not _is_cut(entry):
                continue
            key = entry["number"], entry["time"]  # a resumed run gives numbers again
            if key not in results:
                if time.monotonic() >= ends_at:
                    num_left += 1
                    continue
                if ends_at == float("inf"):
                    ends_at = time.monotonic() + budget_s
                results[key] = _has(f"{text}\n{self._whole_text(entry)}", words)
            if results[key]:
                found.append(place)
        return Found(places=found, num_unsearched=num_left)

    def _results_of(self, words: tuple[str, ...]) -> dict[tuple[Any, ...], bool]:
        with self._lock:
            results = self._results.pop(words, {})
            self._results[words] = results
            if len(self._results) > _MOST_KEPT:
                del self._results[next(iter(self._results))]
            return results

    def _whole_text(self, entry: Entry) -> str:
        data = self._read(entry)
        try:
            group = _Group() if data is None else _decoder.decode(data)
        except msgspec.DecodeError:
            return ""
        said = [*(each.content for each in group.messages), *(each.text for each in group.samples)]
        return "\n".join(said).casefold()


def _text_of(entry: Entry) -> str:
    parts = [entry["prompt"], entry["reason"], entry["error"], *entry["golds"], *entry["texts"]]
    return "\n".join(parts).casefold()


def _is_cut(entry: Entry) -> bool:
    return any(text.endswith(_CUT) for text in (entry["prompt"], *entry["texts"]))


def _has(text: str, words: Sequence[str]) -> bool:
    return all(word in text for word in words)
