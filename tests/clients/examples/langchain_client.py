"""LangChain's ChatOpenAI."""

import sys

from common import add, report

try:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel
except ImportError as error:
    sys.exit(report(error))


class Numbers(BaseModel):
    """Two numbers."""

    a: int
    b: int


class Add(BaseModel):
    """Adds two numbers."""

    a: int
    b: int


url, model = sys.argv[1:]
llm = ChatOpenAI(base_url=url, api_key="none", model=model)
question = HumanMessage("What is 2 + 3?", name="bob")
tools = llm.bind_tools([tool(add)])
call = tools.invoke([question])
results = [ToolMessage(str(add(**each["args"])), tool_call_id=each["id"]) for each in call.tool_calls]
forced = llm.bind_tools([tool(add)], tool_choice="required").invoke([question])
report(
    {
        "chat": llm.invoke([question]).content,
        "options": ChatOpenAI(base_url=url, api_key="none", model=model, seed=7, logprobs=True, top_logprobs=2)
        .invoke("What is 2 + 3?")
        .content,
        "stream": "".join(chunk.content for chunk in llm.stream("What is 2 + 3?")),
        "tools": tools.invoke([question, call, *results]).content,
        "required": forced.tool_calls[0]["args"],
        "structured": llm.with_structured_output(Numbers, method="json_schema").invoke("x").model_dump(),
        "json": llm.with_structured_output(Numbers, method="function_calling").invoke("x").model_dump(),
    }
)
