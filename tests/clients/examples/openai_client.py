"""OpenAI's own client."""

import json
import sys

from common import PICTURE, TOOL, add, report

try:
    from openai import OpenAI
    from pydantic import BaseModel
except ImportError as error:
    sys.exit(report(error))


class Numbers(BaseModel):
    """What to say."""

    a: int
    b: int


url, model = sys.argv[1:]
client = OpenAI(base_url=url, api_key="none")
hi = [{"role": "user", "content": "What is 2 + 3?"}]
chat = client.chat.completions.create(model=model, messages=hi)
options = client.chat.completions.create(
    model=model, messages=hi, seed=1, temperature=0.2, top_p=0.9, logprobs=True, top_logprobs=5, n=2
)
with client.chat.completions.stream(model=model, messages=hi) as stream:
    streamed = stream.get_final_completion()
history = [*hi]
first = client.chat.completions.create(model=model, messages=history, tools=[TOOL], parallel_tool_calls=False)
history.append(first.choices[0].message)
for call in first.choices[0].message.tool_calls:
    result = add(**json.loads(call.function.arguments))
    history.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
last = client.chat.completions.create(model=model, messages=history, tools=[TOOL])
parsed = client.chat.completions.parse(model=model, messages=hi, response_format=Numbers)
shown = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE, "detail": "low"}}]}]
report(
    {
        "chat": chat.choices[0].message.content,
        "options": options.choices[1].message.content,
        "stream": streamed.choices[0].message.content,
        "tools": last.choices[0].message.content,
        "structured": parsed.choices[0].message.parsed.model_dump(),
        "image": client.chat.completions.create(model=model, messages=shown).choices[0].message.content,
    }
)
