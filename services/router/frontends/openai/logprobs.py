"""Logprobs in the formats of OpenAI and vLLM."""

from collections.abc import Sequence
from typing import Any

from penstock.model.detokenize import IncrementalDetokenizer, TokenTexts
from services.router.frontends.openai.choice import Choice, PromptScore, Token

Position = tuple[int, float, Sequence[tuple[int, float]]]
"""An id, its logprob, and the most likely ids at its position."""


class LogprobsFormat:
    """Formats the logprobs of one answer."""

    def __init__(self, texts: TokenTexts, *, names_ids: bool, num_top: int) -> None:
        """Show `num_top` of the most likely tokens at each position; `names_ids`: name tokens by their ids."""
        self._texts = texts
        self._names_ids = names_ids
        self._num_top = num_top

    def chat(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Return logprobs in the format of /v1/chat/completions."""
        content = [
            {
                **self._entry(token.number, token.logprob),
                "top_logprobs": [self._entry(*each) for each in token.top[: self._num_top]],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def completion(
        self, tokens: Sequence[Token], *, prompt_ids: Sequence[int], scores: Sequence[PromptScore], first_offset: int
    ) -> dict[str, Any]:
        """Return logprobs in the format of /v1/completions.

        Args:
            tokens: Tokens of the answer.
            prompt_ids: The prompt, if it is shown before them.
            scores: The model's scores of the prompt's ids but the first.
            first_offset: Where the answer begins in the returned text.
        """
        positions: list[Position] = [
            (number, score.logprob, score.top) for number, score in zip(prompt_ids[1:], scores, strict=True)
        ]
        positions += [(token.number, token.logprob, token.top) for token in tokens]
        offsets = [*self._offsets(prompt_ids), *(first_offset + token.offset for token in tokens)]
        first = [None] if prompt_ids else []  # no token precedes it
        return {
            "tokens": [*map(self._name, prompt_ids[:1]), *(self._name(number) for number, _, _ in positions)],
            "token_logprobs": [*first, *(logprob for _, logprob, _ in positions)],
            "top_logprobs": [*first, *(self._named(*position) for position in positions)],
            "text_offset": offsets,
        }

    def prompt(self, ids: Sequence[int], choice: Choice, *, num_top: int) -> list[dict[str, Any] | None]:
        """Return the prompt's logprobs in vLLM's format: for each id the most likely ids and itself, by id."""
        entries: list[dict[str, Any] | None] = [None]
        for number, score in zip(ids[1:], choice.prompt_scores, strict=True):
            ranked = {each: (logprob, rank) for rank, (each, logprob) in enumerate(score.top, start=1)}
            shown = {number: ranked.get(number, (score.logprob, None)), **dict(list(ranked.items())[:num_top])}
            entries.append(
                {
                    str(each): {"logprob": logprob, "rank": rank, "decoded_token": self._texts.name_of(each)}
                    for each, (logprob, rank) in shown.items()
                }
            )
        return entries

    def _entry(self, number: int, logprob: float) -> dict[str, Any]:
        return {"token": self._name(number), "logprob": logprob, "bytes": list(self._texts.bytes_of(number))}

    def _named(self, number: int, logprob: float, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Return the most likely tokens and the sampled one; if two have the same name, the more likely."""
        named: dict[str, float] = {}
        for each, its_logprob in [*top[: self._num_top], (number, logprob)]:
            named.setdefault(self._name(each), its_logprob)
        return named

    def _name(self, number: int) -> str:
        return f"token_id:{number}" if self._names_ids else self._texts.name_of(number)

    def _offsets(self, ids: Sequence[int]) -> list[int]:
        """Return, for each id, the number of complete characters before it."""
        stream, num_chars, offsets = IncrementalDetokenizer(self._texts), 0, []
        for number in ids:
            offsets.append(num_chars)
            num_chars += len(stream.add(number))
        return offsets
