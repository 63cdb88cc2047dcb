"""How an answer begins that must call a tool, in the form in which its model writes calls."""

from typing import Any

import pytest

from penstock.model.chat.call_block import CallFormat
from penstock.model.chat.tool_calls import CLOSE, ToolCallReader
from penstock.records import ToolCall
from services.router.frontends.openai.parsing.forced_call import begin_call
from services.router.frontends.openai.schema.requests import ChatRequest
from tests.support.router.openai_tools import ADD, MULTIPLY

NAMED: dict[str, Any] = {"type": "function", "function": {"name": "add"}}
REST: dict[tuple[CallFormat, bool], str] = {
    ("hermes", True): ' {"a": 1}}\n',
    ("hermes", False): 'add", "arguments": {"a": 1}}\n',
    ("xml", True): "<parameter=a>\n1\n</parameter>\n</function>\n",
    ("xml", False): "add>\n<parameter=a>\n1\n</parameter>\n</function>\n",
}


@pytest.mark.parametrize(("call_format", "is_named"), REST)
def test_a_policy_that_goes_on_makes_a_call(call_format: CallFormat, is_named: bool) -> None:
    """The beginning with a usual rest of a call is the call, for the reader of answers."""
    choice = NAMED if is_named else "required"
    body = ChatRequest.model_validate(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "x"}],
            "tools": [ADD, MULTIPLY],
            "tool_choice": choice,
        }
    )
    reader = ToolCallReader(call_format, [ADD, MULTIPLY])
    found = reader.add(begin_call(body, call_format) + REST[call_format, is_named] + CLOSE)
    assert found == [ToolCall(name="add", arguments={"a": 1})]
