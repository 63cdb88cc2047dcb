"""The base of all request models, and the parameters that are refused.

A parameter that would change the answer and is not supported is refused by name, never skipped; where its value changes
nothing, it is accepted. Unknown keys inside messages are ignored: the policy neither sees nor needs them, and agents
collect them from other servers' answers. A null is the same as an absent key.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, LiteralString, TypeAlias, TypeVar

import pydantic
from pydantic_core import PydanticCustomError

from penstock.documented import Documented

ItemT = TypeVar("ItemT")

Items: TypeAlias = Annotated[list[ItemT], pydantic.Field(fail_fast=True)]
"""A list that is checked up to its first wrong item. Errors for all that a body may hold would take minutes."""

PARAMETER_FAULT: Final = "parameter_fault"
"""The type of pydantic's errors that name the parameter at fault in their context."""
_NO_PENALTY = "the policy's distribution is not changed, so that logprobs stay its own"
_ROUTED = "the router chooses the replica and the order"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "add_generation_prompt": ((), "the assistant speaks next, unless continue_final_message is set"),
    "allowed_token_ids": ((), _NO_PENALTY),
    "audio": ((), "there is text and images only"),
    "best_of": ((1,), "all choices are returned; use n"),
    "bad_words": (([],), _NO_PENALTY),
    "chat_template": ((), "the model's own is used, as in training; chat_template_kwargs set its variables"),
    "continue_final_message": ((False,), "only a chat goes on with its last message"),
    "documents": (([],), "put them into the messages"),
    "frequency_penalty": ((0,), _NO_PENALTY),
    "function_call": ((), "use tools"),
    "functions": (([],), "use tools"),
    "include_reasoning": ((True,), "the answer is not shortened"),
    "length_penalty": ((1,), "there is no beam search"),
    "logit_bias": (({},), _NO_PENALTY),
    "min_p": ((0,), _NO_PENALTY),
    "modalities": ((["text"],), "there is text only"),
    "prediction": ((), "there is no speculation"),
    "presence_penalty": ((0,), _NO_PENALTY),
    "priority": ((0,), _ROUTED),
    "reasoning_effort": ((), "put it into the prompt"),
    "repetition_penalty": ((1,), _NO_PENALTY),
    "return_hidden_states": ((False,), "the engine returns tokens only"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "skip_special_tokens": ((True,), "special tokens say nothing; their ids are in return_token_ids"),
    "spaces_between_special_tokens": ((True, False), "special tokens say nothing"),
    "store": ((False,), "use record"),
    "suffix": (("",), "the policy only continues a prompt"),
    "stop_regex": ((), "use stop"),
    "use_beam_search": ((False,), "there is no beam search"),
    "web_search_options": ((), "the policy searches nothing by itself; give it a tool"),
}
"""Unsupported parameters: the values that change nothing, and why other values are refused."""

HINTS = (
    "cache_salt",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "rid",
    "safety_identifier",
    "verbosity",
)
"""Parameters that are accepted with any value, because no answer depends on them."""


class RequestModel(Documented):
    model_config = pydantic.ConfigDict(extra="forbid")
    _ignored: ClassVar[tuple[str, ...]] = ()
    """Keys that are accepted with any value."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        given = {name: each for name, each in value.items() if each is not None and name not in cls._ignored}
        if cls.model_config.get("extra") == "ignore":
            return given
        if given.get("add_generation_prompt") is (not given.get("continue_final_message")):
            del given["add_generation_prompt"]  # means the same as continue_final_message
        for name in [name for name in given if name in REFUSED and name not in cls.model_fields]:
            neutral, why = REFUSED[name]
            if not any(type(given[name]) is type(each) and given[name] == each for each in _spellings(neutral)):
                raise parameter_fault(name, "is not supported ({why}); leave it out", why=why)
            del given[name]
        return given


class MessageModel(RequestModel):
    """A part of a message: unknown keys are ignored."""

    model_config = pydantic.ConfigDict(extra="ignore")


def parameter_fault(name: str, message: LiteralString, **values: str) -> PydanticCustomError:
    """Return the error of a model's validator that blames the parameter `name`. `message` follows that name, and has
    its `values` in braces."""
    return PydanticCustomError(PARAMETER_FAULT, message, {"name": name, **values})


def _spellings(neutral: tuple[Any, ...]) -> list[Any]:
    return [*neutral, *(float(each) for each in neutral if type(each) is int)]
