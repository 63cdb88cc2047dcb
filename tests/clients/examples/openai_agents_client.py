"""OpenAI's agents SDK, over chat completions."""

import sys

from common import add, report

try:
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI
    from pydantic import BaseModel
except ImportError as error:
    sys.exit(report(error))


class Numbers(BaseModel):
    """Two numbers."""

    a: int
    b: int


url, model = sys.argv[1:]
set_tracing_disabled(True)
policy = OpenAIChatCompletionsModel(model=model, openai_client=AsyncOpenAI(base_url=url, api_key="none"))
question = "What is 2 + 3?"
report(
    {
        "chat": Runner.run_sync(Agent(name="a", model=policy), question).final_output,
        "tools": Runner.run_sync(Agent(name="a", model=policy, tools=[function_tool(add)]), question).final_output,
        "structured": Runner.run_sync(
            Agent(name="a", model=policy, output_type=Numbers), question
        ).final_output.model_dump(),
    }
)
