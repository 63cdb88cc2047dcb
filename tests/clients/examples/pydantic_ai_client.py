"""Agents of pydantic-ai."""

import sys

from common import add, report

try:
    from pydantic import BaseModel
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
except ImportError as error:
    sys.exit(report(error))


class Numbers(BaseModel):
    """Two numbers."""

    a: int
    b: int


url, model = sys.argv[1:]
policy = OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key="none"))
question = "What is 2 + 3?"
report(
    {
        "chat": Agent(policy).run_sync(question).output,
        "options": Agent(policy).run_sync(question, model_settings={"seed": 1, "temperature": 0.5}).output,
        "tools": Agent(policy, tools=[add]).run_sync(question).output,
        "required": Agent(policy, output_type=Numbers).run_sync(question).output.model_dump(),
        "structured": Agent(policy, output_type=NativeOutput(Numbers)).run_sync(question).output.model_dump(),
    }
)
