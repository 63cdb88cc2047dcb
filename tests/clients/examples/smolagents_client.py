"""Models of smolagents."""

import json
import sys

from common import report

try:
    from smolagents import OpenAIServerModel, tool
    from smolagents.models import ChatMessage
except ImportError as error:
    sys.exit(report(error))


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: One.
        b: Another.
    """
    return a + b


url, model = sys.argv[1:]
policy = OpenAIServerModel(model_id=model, api_base=url, api_key="none")
question = [ChatMessage(role="user", content="What is 2 + 3?")]
call = policy.generate(question, tools_to_call_from=[add]).tool_calls[0]
arguments = call.function.arguments
report(
    {
        "chat": policy.generate(question, stop_sequences=["Observation:"]).content,
        "stream": "".join(delta.content or "" for delta in policy.generate_stream(question)),
        "required": json.loads(arguments) if isinstance(arguments, str) else arguments,
    }
)
