"""Finds the assistant's text in a rendered conversation, as ranges of characters, for supervised training.

A template with `{% generation %}` marks gives them itself. With any other, an assistant's turn is what one message
adds:

    before = the messages before it, with the generation prompt      <|im_start|>assistant\\n
    after  = the messages up to it, without                          <|im_start|>assistant\\n5<|im_end|>\\n
    turn   = after minus before                                      5<|im_end|>\\n

This holds only if `before` begins `after`, and `after` begins the whole conversation. If a template renders a turn
differently once others follow it, for example because it drops earlier thoughts, the text to learn is undefined, and
the conversation is rejected.
"""

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from penstock.errors import InvalidRequestError

Span: TypeAlias = tuple[int, int]
"""Characters [start, stop)."""
Fill: TypeAlias = Callable[[int, bool], str]
"""Renders the first n messages, with or without the generation prompt."""

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def has_marks(template: str) -> bool:
    """Return whether a chat template marks the assistant's text."""
    return _MARK.search(template) is not None


def added_spans(roles: Sequence[str], fill: Fill) -> tuple[str, list[Span]]:
    """Return the whole conversation and each assistant's turn in it, up to the start of the template's next message.

    Args:
        roles: Roles of the messages.
        fill: Renders the first messages.

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
                "it (templates of thinking models drop earlier thoughts); end the conversation with it, or mark "
                "what to learn with {% generation %} in the template"
            )
        spans.append((len(before), len(after)))
    return whole, spans
