"""Renders messages to token ids with the model's own chat template.

Invariants: each image has exactly one placeholder id; text never becomes a special token, even if it spells one; the
policy's output is never tokenised again: a later turn's ids are appended to the earlier ids. Needs transformers'
tokenizers but not torch.
"""

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from penstock.errors import ConfigError, InvalidRequestError
from penstock.model.chat.assistant_spans import Span, added_spans, has_marks
from penstock.model.chat.assistant_turn import AssistantTurn
from penstock.model.chat.call_block import CallFormat
from penstock.model.chat.spelled_tokens import ASSISTANT, SpelledTokens, in_each_text, pieces
from penstock.model.chat.template_probe import TemplateProbe
from penstock.model.chat.template_variables import require_free, require_read
from penstock.model.detokenize import TokenTexts
from penstock.model.tokens import end_token_ids, image_token_id
from penstock.records import ImagePart, Message, TextPart


class Renderer:
    """One model's chat template and tokenizer. Not thread-safe."""

    def __init__(self, tokenizer: Any, *, image_token_id: int | None, end_ids: Sequence[int] = ()) -> None:
        """Wrap a transformers tokenizer.

        Args:
            tokenizer: The tokenizer, with a chat template.
            image_token_id: Id of the image placeholder; None for a model that takes no images.
            end_ids: Ids that end generation, for `render_conversation`.

        Raises:
            ConfigError: the tokenizer has no chat template.
        """
        if not tokenizer.chat_template:
            raise ConfigError(
                "model.path holds no chat template; put the instruct model's chat_template.jinja beside the tokenizer"
            )
        self._tokenizer = tokenizer
        self._image_token_id = image_token_id
        self._end_ids = frozenset(end_ids)
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        special |= set(tokenizer.all_special_tokens)
        self._special_ids = frozenset(tokenizer.convert_tokens_to_ids(sorted(special)))
        image_mark = None if image_token_id is None else tokenizer.convert_ids_to_tokens(image_token_id)
        self._probe = TemplateProbe(self._fill_template, image_mark=image_mark)
        self._spelled = SpelledTokens(special)

    @classmethod
    def load(cls, model_path: Path) -> Self:
        """Read tokenizer, template and special ids from a checkpoint folder, never from the network.

        Raises:
            ConfigError: the folder has no chat template, or its tokenizer does not load.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(model_path), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"model.path = {str(model_path)!r}: no tokenizer could be loaded: {str(error).splitlines()[0]}"
            ) from None
        return cls(tokenizer, image_token_id=image_token_id(model_path), end_ids=end_token_ids(model_path))

    def render_prompt(
        self,
        messages: Sequence[Message],
        *,
        num_images: int,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] = {},
    ) -> list[int]:
        """Return the ids of a conversation, with the template's generation prompt at the end.

        Args:
            messages: The conversation.
            num_images: The number of images in it.
            tools: Tools that the assistant may call, in OpenAI's JSON form; see `takes_tools`.
            template_kwargs: Other variables of the template, such as `enable_thinking`.

        Raises:
            InvalidRequestError: placeholders and images differ in number, or the template rejects the messages or drops
                part of them.
        """
        taken_out: list[str] = []
        chat = [self._to_chat(message, taken_out) for message in messages]
        take_out = functools.partial(self._spelled.take_out, taken_out)
        rendered = self._fill_template(
            chat, tools=[in_each_text(tool, take_out) for tool in tools], template_kwargs=template_kwargs
        )
        self._probe.require_shown(messages, has_tools=bool(tools), template_kwargs=template_kwargs)
        return self._tokenize(rendered, taken_out, num_images=num_images)

    def render_conversation(
        self,
        messages: Sequence[Message],
        *,
        num_images: int,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] = {},
    ) -> tuple[list[int], list[bool]]:
        """Return the ids of a whole conversation, and for each whether the assistant learns it.

        It learns the text that the template marks with `{% generation %}`. Without marks it learns each assistant's
        turn (`penstock.model.chat.assistant_spans`) up to and including the first id that ends generation. Text is
        tokenised separately before and after the start of a turn, like an engine's prompt and answer.

        Args:
            messages: The conversation.
            num_images: The number of images in it.
            tools: As in `render_prompt`.
            template_kwargs: As in `render_prompt`.

        Raises:
            InvalidRequestError: as in `render_prompt`, or the assistant's text cannot be determined.
        """
        taken_out: list[str] = []
        chat = [self._to_chat(message, taken_out) for message in messages]
        take_out = functools.partial(self._spelled.take_out, taken_out)
        shown_tools = [in_each_text(tool, take_out) for tool in tools]
        is_marked = has_marks(self._tokenizer.get_chat_template(tools=shown_tools or None))
        if is_marked:
            rendered, spans = self._fill_marked(chat, shown_tools, template_kwargs)
        else:
            rendered, spans = added_spans(
                [message.role for message in messages],
                lambda number, is_prompt: self._fill_template(
                    chat[:number], tools=shown_tools, template_kwargs=template_kwargs, is_prompt=is_prompt
                ),
            )
        self._probe.require_shown(messages, has_tools=bool(tools), template_kwargs=template_kwargs)
        ids: list[int] = []
        is_learned: list[bool] = []
        end = 0
        for start, stop in spans:
            others = self._encode(rendered[end:start], taken_out)
            turn = self._encode(rendered[start:stop], taken_out)
            num_said = len(turn) if is_marked else self._num_said(turn)
            ids += others + turn
            is_learned += [False] * len(others) + [True] * num_said + [False] * (len(turn) - num_said)
            end = stop
        others = self._encode(rendered[end:], taken_out)
        self._check_placeholders(ids + others, num_images)
        if not any(is_learned):
            raise InvalidRequestError("the model's chat template shows nothing that an assistant says")
        return ids + others, is_learned + [False] * len(others)

    def render_text(self, text: str) -> list[int]:
        """Return the ids of plain text, without the template; special tokens that it spells become ordinary tokens."""
        taken_out: list[str] = []
        return self._tokenize(self._spelled.take_out(taken_out, text), taken_out, num_images=0)

    @property
    def takes_tools(self) -> bool:
        """Whether the template shows tools to the assistant."""
        return self._probe.takes_tools

    @property
    def call_format(self) -> CallFormat:
        """The form in which the template, and so the model, writes calls; hermes if it shows none."""
        return self._probe.call_format

    def opens_thinking(self, template_kwargs: Mapping[str, Any] = {}) -> bool:
        """Return whether the generation prompt opens `<think>`, so that an answer has the closing mark only."""
        return self._probe.opens_thinking(template_kwargs)

    def require_variables(self, names: Collection[str]) -> None:
        """Check that the template reads all of these names.

        Raises:
            InvalidRequestError: it does not read one of them.
        """
        if names:
            require_read(names, self._tokenizer.get_chat_template())

    def drops_thoughts(self, messages: Sequence[Message], template_kwargs: Mapping[str, Any] = {}) -> bool:
        """Return whether the template leaves out an assistant's thoughts once `messages` follow its turn.

        Raises:
            InvalidRequestError: the template rejects the messages.
        """
        return self._probe.drops_thoughts([self._to_chat(message, []) for message in messages], template_kwargs)

    def num_opening_ids(self, template_kwargs: Mapping[str, Any] = {}) -> int:
        """Return how many ids at the end of a generation prompt an earlier turn without its thoughts lacks.

        Raises:
            InvalidRequestError: the template renders such a turn in an entirely different form.
        """
        prompt, header = self._probe.opening(template_kwargs)
        return len(self._encode(prompt, ())) - len(self._encode(header, ()))

    def parse_turn(
        self, text: str, *, tools: Sequence[Mapping[str, Any]] = (), template_kwargs: Mapping[str, Any] = {}
    ) -> AssistantTurn:
        """Parse the policy's answer to a prompt with these tools and variables."""
        return AssistantTurn.parse(
            text, call_format=self.call_format, tools=tools, is_thinking=self.opens_thinking(template_kwargs)
        )

    @functools.cached_property
    def longest_token_bytes(self) -> int:
        """The most bytes of text that one token stands for; an upper bound if the tokenizer is not a byte-level BPE."""
        size = len if self._is_byte_level else _num_bytes  # a byte-level BPE writes each byte as one character
        added = self._tokenizer.added_tokens_decoder.values()
        return max(*map(size, self._tokenizer.get_vocab()), *(_num_bytes(token.content) for token in added))

    @property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in repr(self._tokenizer.backend_tokenizer.decoder)

    def token_texts(self) -> TokenTexts:
        """Return the text of each id; special ids have none.

        Raises:
            ConfigError: the tokenizer is not a byte-level BPE.
        """
        decoder = repr(self._tokenizer.backend_tokenizer.decoder)
        if not self._is_byte_level:
            raise ConfigError(
                f"model.path: the tokenizer's decoder is {decoder[:80]}; only text of byte-level BPE can be streamed"
            )
        added = {number: token.content for number, token in self._tokenizer.added_tokens_decoder.items()}
        return TokenTexts(self._tokenizer.get_vocab(), added=added, special_ids=self._special_ids)

    def render_continuation(
        self,
        last_id: int,
        messages: Sequence[Message],
        *,
        num_images: int,
        num_earlier_images: int = 0,
        template_kwargs: Mapping[str, Any] = {},
    ) -> list[int]:
        """Return the ids that follow an assistant's turn: its end, `messages`, and the next generation prompt.

        The policy continues from its own text, including thoughts, even if the template would leave out the thoughts of
        earlier turns.

        Args:
            last_id: Last id of the assistant's turn. If it already ends the turn, the end is not repeated.
            messages: The messages that follow.
            num_images: The number of images in these messages.
            num_earlier_images: The number of images before them, for templates that number images.
            template_kwargs: Other variables of the template, as for the prompt.

        Raises:
            InvalidRequestError: as in `render_prompt`, or the template changes an assistant's text.
        """
        taken_out: list[str] = []
        shown = tuple(ImagePart(index=index) for index in range(num_earlier_images))
        before = [
            Message(role="user", parts=(*shown, TextPart(text="?"))),
            Message(role="assistant", parts=(TextPart(text="!"),)),
        ]
        chat = [self._to_chat(message, taken_out) for message in [*before, *messages]]
        chat[1] = self._probe.message("assistant", ASSISTANT)
        rendered = self._fill_template(chat, template_kwargs=template_kwargs)
        _, mark, tail = rendered.partition(ASSISTANT)
        if not mark or ASSISTANT in tail:
            raise InvalidRequestError(
                "the model's chat template changes an assistant's text, so turns cannot be appended; play single turns"
            )
        self._probe.require_shown(
            [*before, *messages], has_tools=False, template_kwargs=template_kwargs, num_before=len(before)
        )
        ids = self._tokenize(tail, taken_out, num_images=num_images)
        return ids[1:] if ids[:1] == [last_id] else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _to_chat(self, message: Message, taken_out: list[str]) -> dict[str, Any]:
        """Return the message in the form of chat templates, with marks in place of text that spells special tokens."""
        take_out = functools.partial(self._spelled.take_out, taken_out)
        # Adjacent texts are joined first: together they may spell a special token.
        content: list[dict[str, str]] = []
        for part in message.parts:
            if not isinstance(part, TextPart):
                content.append({"type": "image"})
            elif content and content[-1]["type"] == "text":
                content[-1]["text"] += part.text
            else:
                content.append({"type": "text", "text": part.text})
        for piece in content:
            if piece["type"] == "text":
                piece["text"] = take_out(piece["text"])
        chat: dict[str, Any] = {"role": message.role}
        if message.tool_calls:
            calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
            chat["tool_calls"] = [{"type": "function", "function": in_each_text(call, take_out)} for call in calls]
        if self._image_token_id is not None:
            return {**chat, "content": content}
        if any(piece["type"] == "image" for piece in content):
            raise InvalidRequestError(
                "the prompt has images, but the model takes none: its config.json has no image_token_id"
            )
        return {**chat, "content": "".join(piece["text"] for piece in content)}

    def _fill_template(
        self,
        chat: Sequence[dict[str, Any]],
        /,
        *,
        tools: Sequence[Any] = (),
        template_kwargs: Mapping[str, Any] = {},
        is_prompt: bool = True,
    ) -> str:
        require_free(template_kwargs)
        ours: dict[str, Any] = {"tokenize": False, "add_generation_prompt": is_prompt}
        if tools:
            ours["tools"] = list(tools)
        with _reporting_refusals(chat):
            return str(self._tokenizer.apply_chat_template(list(chat), **template_kwargs, **ours))

    def _fill_marked(
        self, chat: list[dict[str, Any]], tools: Sequence[Any], template_kwargs: Mapping[str, Any]
    ) -> tuple[str, list[Span]]:
        """Fill in a template that marks the assistant's text; return the rendering and the marked ranges."""
        from transformers.utils.chat_template_utils import render_jinja_template

        require_free(template_kwargs)
        with _reporting_refusals(chat):
            [rendered], [spans] = render_jinja_template(
                conversations=[chat],
                tools=list(tools) or None,
                chat_template=self._tokenizer.get_chat_template(tools=list(tools) or None),
                return_assistant_tokens_mask=True,
                **template_kwargs,
                **self._tokenizer.special_tokens_map,
            )
        return rendered, spans

    def _num_said(self, turn: Sequence[int]) -> int:
        """Count the tokens of an assistant's turn up to and including the one that ends generation."""
        for index, token in enumerate(turn):
            if token in self._end_ids:
                return index + 1
        raise InvalidRequestError(
            f"the model's chat template ends an assistant's turn with none of the ids that end generation, "
            f"{sorted(self._end_ids)}, so the model would never learn to stop; correct eos_token_id in "
            "generation_config.json"
        )

    def _tokenize(self, rendered: str, taken_out: Sequence[str], *, num_images: int) -> list[int]:
        ids = self._encode(rendered, taken_out)
        self._check_placeholders(ids, num_images)
        return ids

    def _encode(self, rendered: str, taken_out: Sequence[str]) -> list[int]:
        ids: list[int] = []
        for text, was_taken_out in pieces(rendered, taken_out):
            ids += self._spell_out(text) if was_taken_out else self._tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _check_placeholders(self, ids: Sequence[int], num_images: int) -> None:
        num_placeholders = 0 if self._image_token_id is None else ids.count(self._image_token_id)
        if num_placeholders != num_images:
            raise InvalidRequestError(
                f"the chat template made {num_placeholders} image placeholders (id {self._image_token_id}) "
                f"for {num_images} images; the numbers must be equal"
            )

    def _spell_out(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        if not self._special_ids.isdisjoint(ids):
            raise InvalidRequestError(
                f"the text holds {text!r}, which the tokenizer cannot encode as ordinary tokens; remove it"
            )
        return ids


@contextmanager
def _reporting_refusals(chat: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Raise a template's rejection of the messages as an InvalidRequestError."""
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, TypeError) as error:  # TypeError: the template uses a field that such messages lack
        roles = ", ".join(message["role"] for message in chat)
        raise InvalidRequestError(f"the model's chat template refuses messages of roles {roles}: {error}") from None


def _num_bytes(text: str) -> int:
    return len(text.encode())
