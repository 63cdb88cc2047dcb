"""Checks the variables that data and clients may set in a chat template, besides its messages."""

import functools
import inspect
import re
from collections.abc import Collection, Iterable

from penstock.errors import InvalidRequestError

_TEMPLATE_TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""transformers' own tags, which jinja does not know."""

_FUNCTIONS = frozenset({"raise_exception", "strftime_now"})
"""Functions that transformers gives to every template."""


def require_free(names: Iterable[str]) -> None:
    """Reject variables that Penstock sets, or that are settings of transformers, such as another template.

    Raises:
        InvalidRequestError: one is reserved.
    """
    if taken := sorted(_reserved() & set(names)):
        raise InvalidRequestError(f"chat_template_kwargs sets {taken}, which are reserved; remove them")


def require_read(names: Collection[str], template: str) -> None:
    """Reject variables that the template never reads, because they are misspelt or meant for another model.

    Raises:
        InvalidRequestError: the template does not read one of them.
    """
    require_free(names)
    read, computed = _variables(template)
    if unknown := sorted(set(names) - read):
        there = sorted(read - computed - _reserved())
        raise InvalidRequestError(
            f"chat_template_kwargs sets {unknown}, which the model's chat template does not read; it reads "
            f"{', '.join(there) or 'none but its messages'}"
        )


@functools.cache
def _reserved() -> frozenset[str]:
    from transformers import PreTrainedTokenizerBase

    arguments = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    return frozenset(arguments - {"self", "kwargs", "documents"} | {"messages"})


@functools.lru_cache(maxsize=8)
def _variables(template: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the variables that a template may read before it sets them, and those that it sets."""
    import jinja2.meta
    from jinja2.nodes import Macro, Name

    parsed = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_TEMPLATE_TAGS.sub("", template))
    read = frozenset(jinja2.meta.find_undeclared_variables(parsed))
    macros = {macro.name for macro in parsed.find_all(Macro)}
    return read - macros - _FUNCTIONS, frozenset(name.name for name in parsed.find_all(Name) if name.ctx == "store")
