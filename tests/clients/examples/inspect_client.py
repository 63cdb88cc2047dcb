"""Evaluations of inspect-ai."""

import asyncio
import sys

from common import report

try:
    from inspect_ai.model import ChatMessageUser, GenerateConfig, execute_tools, get_model
    from inspect_ai.tool import tool
except ImportError as error:
    sys.exit(report(error))


@tool
def add():
    async def execute(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: One.
            b: Another.
        """
        return a + b

    return execute


async def main(url: str, name: str) -> None:
    """Run the examples."""
    model = get_model(f"openai-api/local/{name}", base_url=url, api_key="none")
    question = ChatMessageUser(content="What is 2 + 3?")
    chat = await model.generate([question])
    config = GenerateConfig(seed=1, logprobs=True, top_logprobs=2, temperature=0.5)
    options = await model.generate([question], config=config)
    first = await model.generate([question], tools=[add()])
    messages, _ = await execute_tools([question, first.message], [add()])
    last = await model.generate([question, first.message, *messages], tools=[add()])
    report({"chat": chat.completion, "options": options.completion, "tools": last.completion})


asyncio.run(main(*sys.argv[1:]))
