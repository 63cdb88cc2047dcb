"""Begins an answer that must call a tool.

The policy cannot be made to want a call, but its answer can be begun for it: the part of a call that does not depend on
the policy is put into the prompt.
"""

import json

from penstock.model.chat.call_block import CallFormat
from penstock.model.chat.tool_calls import OPEN
from services.router.frontends.openai.errors import ParameterError
from services.router.frontends.openai.parsing.constraint import read_constraint
from services.router.frontends.openai.schema.messages import NamedTool
from services.router.frontends.openai.schema.requests import ChatRequest


def begin_call(body: ChatRequest, call_format: CallFormat) -> str:
    """Return the text with which the answer begins; empty if it need not call a tool.

    Raises:
        ParameterError: there is no such tool, or the answer must also have another form.
    """
    choice = body.tool_choice
    if choice in ("auto", "none"):
        return ""
    names = [tool.function.name for tool in body.tools]
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in names:
            raise ParameterError("tool_choice", f"tool_choice names {name!r}, which is not among the tools {names}")
        names = [name]
    if not names:
        raise ParameterError("tool_choice", f"tool_choice = {choice!r} needs tools; send some")
    if read_constraint(body) is not None:
        raise ParameterError(
            "tool_choice", f"tool_choice = {choice!r} and a form of the answer exclude each other; send one"
        )
    name = names[0] if len(names) == 1 else ""
    if call_format == "xml":
        return f"{OPEN}\n<function=" + (f"{name}>\n" if name else "")
    # The continuation begins with a space or inside a string, where tokenizers begin a token, too.
    return f'{OPEN}\n{{"name": ' + (f'{json.dumps(name)}, "arguments":' if name else '"')
