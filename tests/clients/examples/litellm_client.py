"""litellm."""

import json
import sys

from common import TOOL, add, report

try:
    import litellm
except ImportError as error:
    sys.exit(report(error))

url, model = sys.argv[1:]
where = {"model": f"hosted_vllm/{model}", "api_base": url, "api_key": "none"}
messages = [{"role": "user", "content": "What is 2 + 3?"}]
chat = litellm.completion(messages=messages, **where)
stream = litellm.completion(messages=messages, stream=True, **where)
history = [*messages]
first = litellm.completion(messages=history, tools=[TOOL], **where)
history.append(first.choices[0].message)
for call in first.choices[0].message.tool_calls:
    result = add(**json.loads(call.function.arguments))
    history.append({"role": "tool", "tool_call_id": call.id, "name": "add", "content": str(result)})
where["model"] = f"openai/{model}"
again = [*messages, chat.choices[0].message, *messages]
form = litellm.completion(messages=messages, response_format={"type": "json_object"}, seed=1, **where)
report(
    {
        "chat": chat.choices[0].message.content,
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in stream),
        "tools": litellm.completion(messages=history, tools=[TOOL], **where).choices[0].message.content,
        "history": litellm.completion(messages=again, **where).choices[0].message.content,
        "json": json.loads(form.choices[0].message.content),
    }
)
