"""The bodies of requests about token ids, as in vLLM and SGLang."""

from typing import Annotated, Any

import pydantic

from services.router.frontends.openai.schema.base import Items, RequestModel
from services.router.frontends.openai.schema.messages import ChatMessage, Tool


class TokenizeRequest(RequestModel):
    """The body of /tokenize: a text, or messages."""

    _ignored = ("add_special_tokens",)
    model: str | None = None
    """Name of the served policy."""
    prompt: str | None = None
    """Text, which never becomes a special token."""
    messages: Items[ChatMessage] = pydantic.Field(default_factory=list)
    """A conversation, in place of the text."""
    tools: Items[Tool] = pydantic.Field(default_factory=list)
    """With messages: tools that the policy may call."""
    chat_template_kwargs: dict[str, Any] = pydantic.Field(default_factory=dict)
    """With messages: variables of the chat template."""
    return_token_strs: bool = False
    """Return the text of each token, too."""

    @pydantic.model_validator(mode="after")
    def _has_one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(RequestModel):
    """The body of /detokenize."""

    model: str | None = None
    """Name of the served policy."""
    tokens: Items[Annotated[int, pydantic.Field(ge=0, lt=2**31)]]
    """The ids."""
