"""What an assistant says in a rendered conversation, as ranges of characters: what supervised training learns.

A template with `{% generation %}` marks says it itself. Of any other, an assistant's turn is what one message adds:

    before = the messages before it, with the generation prompt      <|im_start|>assistant\\n
    after  = the messages up to it, without                          <|im_start|>assistant\\n5<|im_end|>\\n
    turn   = after less before                                       5<|im_end|>\\n

This holds only if `before` begins `after`, and `after` begins the whole conversation. Where a template renders a turn
differently once others follow it, such as one that drops earlier thoughts, nobody can say what the policy should say,
and the conversation is refused.
"""

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from penstock.errors import InvalidRequestError

Span: TypeAlias = tuple[int, int]
"""Characters [start, stop)."""
Fill: TypeAlias = Callable[[int, bool], str]
"""Renders that many messages, from the first, with or without the generation prompt."""

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def has_marks(template: str) -> bool:
    """Whether a chat template marks what an assistant says."""
    return _MARK.search(template) is not None


def added_spans(roles: Sequence[str], fill: Fill) -> tuple[str, list[Span]]:
    """Return the whole conversation and each assistant's turn in it, up to where the template's next message begins.

    Args:
        roles: Of the messages.
        fill: Renders their beginning.

    Raises:
        InvalidRequestError: the template renders a turn differently once others follow it, or does not begin it with
            its generation prompt.
    """
    whole = fill(len(roles), False)
    spans = []
    for number, role in enumerate(roles):
        if role != "assistant":
            continue
        before, after = fill(number, True), fill(number + 1, False)
        if not after.startswith(before):
            raise InvalidRequestError(
                f"the model's chat template does not begin message {number}, the assistant's, with its generation "
                "prompt, so its tokens cannot be told apart; mark them with {% generation %} in the template"
            )
        if not whole.startswith(after):
            raise InvalidRequestError(
                f"the model's chat template renders message {number}, the assistant's, differently once others follow "
                "it (templates of thinking models drop earlier thoughts); end the conversation with it, or mark what "
                "is to be learned with {% generation %} in the template"
            )
        spans.append((len(before), len(after)))
    return whole, spans
