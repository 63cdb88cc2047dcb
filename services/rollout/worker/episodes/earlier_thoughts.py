"""Leaves out the policy's earlier thoughts, where the model's chat template does: `worker.strip_thinking`.

Invariant: ids are left out, never made. The ids that stay were sampled, and their text is what the template shows,
except for white space around what was said.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import ConfigError, InvalidRequestError
from penstock.model.chat.chat_template import Renderer
from penstock.model.chat.reasoning import CLOSE, OPEN
from penstock.records import Message, TextPart

_CHOICES: tuple[Mapping[str, Any], ...] = ({}, {"preserve_thinking": False})
"""Template variables to try. Templates that keep thoughts by default leave them out with the second."""
_NEXT_QUESTION = Message(role="user", parts=(TextPart(text="?"),))


class EarlierThoughts:
    """Finds thoughts among the ids of a conversation."""

    def __init__(self, renderer: Renderer) -> None:
        """Look at conversations that `renderer` renders.

        Raises:
            ConfigError: its template never leaves out thoughts, or its vocabulary has no tokens for their marks.
        """
        choices = [choice for choice in _CHOICES if renderer.drops_thoughts([_NEXT_QUESTION], choice)]
        if not choices:
            raise ConfigError(
                "worker.strip_thinking = true, but the chat template of model.path keeps the thoughts of earlier turns "
                "when a user's message follows; leave it out"
            )
        opening, closing = renderer.render_text(OPEN), renderer.render_text(CLOSE)
        if len(opening) != 1 or len(closing) != 1:
            raise ConfigError(
                f"worker.strip_thinking = true, but the tokenizer of model.path has no tokens of their own for {OPEN} "
                f"and {CLOSE}; leave it out"
            )
        try:
            renderer.num_opening_ids(choices[0])
        except InvalidRequestError as error:
            raise ConfigError(str(error)) from None
        self._renderer = renderer
        [self._open_id], [self._close_id] = opening, closing

    def leave_out(
        self,
        ids: list[int],
        turns: Sequence[range],
        messages: Sequence[Message],
        *,
        template_kwargs: Mapping[str, Any] = {},
    ) -> list[int]:
        """Return the ids of a conversation before `messages`, without the thoughts that the template leaves out.

        Args:
            ids: The conversation so far.
            turns: Ranges of the policy's turns in `ids`. Thoughts of other turns stay.
            messages: The messages that follow.
            template_kwargs: Further variables of the template.

        Raises:
            InvalidRequestError: the template cannot show an assistant's turn as it asks for it.
        """
        if not turns or not self._renderer.drops_thoughts(messages, template_kwargs):
            return ids
        num_opening = self._renderer.num_opening_ids(template_kwargs)
        is_open = self._renderer.opens_thinking(template_kwargs)
        kept: list[int] = []
        index = 0
        for turn in turns:
            kept += ids[index : turn.start - num_opening]
            kept += self._said(ids[turn.start : turn.stop], is_open=is_open)
            index = turn.stop
        return [*kept, *ids[index:]]

    def _said(self, turn: list[int], *, is_open: bool) -> list[int]:
        """Return the ids after the thoughts of a turn; only its end if it never closed them."""
        start = self._after_space(turn, 0)
        if not is_open and turn[start : start + 1] != [self._open_id]:
            return turn
        if self._close_id not in turn:
            return [] if self._renderer.decode(turn[-1:]) else turn[-1:]  # the end id has no text
        last = len(turn) - 1 - turn[::-1].index(self._close_id)  # where templates cut
        return turn[self._after_space(turn, last + 1) :]

    def _after_space(self, turn: list[int], index: int) -> int:
        while index < len(turn) and self._renderer.decode([turn[index]]).isspace():
            index += 1
        return index
