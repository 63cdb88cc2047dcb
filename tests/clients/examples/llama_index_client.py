"""LlamaIndex, with a server like OpenAI's."""

import sys

from common import report

try:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike
except ImportError as error:
    sys.exit(report(error))

url, model = sys.argv[1:]
policy = OpenAILike(model=model, api_base=url, api_key="none", is_chat_model=True, context_window=512)
question = [ChatMessage(role="user", content="What is 2 + 3?")]
report(
    {
        "chat": policy.chat(question).message.content,
        "stream": "".join(part.delta or "" for part in policy.stream_chat(question)),
    }
)
