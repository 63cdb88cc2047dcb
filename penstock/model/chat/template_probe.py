"""Finds out what a model's chat template does, by filling it in with test messages.

A template is its model author's program. It rejects content that it cannot show, or drops it silently: Qwen3-VL drops a
second system message and the images of the first. What is dropped depends on the roles and the kinds of parts, hardly
ever on the words; so each shape of a conversation is tried once, with a mark in place of each text, and the result is
cached.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from penstock.errors import InvalidRequestError
from penstock.model.chat.call_block import CallFormat
from penstock.model.chat.reasoning import CLOSE, OPEN
from penstock.records import Message, TextPart

_NAME = "penstock_probe"
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": {"type": "object"}}}
_THOUGHT, _SAID = f"{_NAME}_thought", f"{_NAME}_said"
_MAX_SHAPES = 4096


class FillTemplate(Protocol):
    """Fills in a chat template."""

    def __call__(
        self,
        chat: Sequence[dict[str, Any]],
        /,
        *,
        tools: Sequence[Any] = (),
        template_kwargs: Mapping[str, Any] = {},
        is_prompt: bool = True,
    ) -> str:
        """Raises: InvalidRequestError: the template rejects the messages."""
        ...


class TemplateProbe:
    """The behaviour of one template. Not thread-safe."""

    def __init__(self, fill: FillTemplate, *, image_mark: str | None) -> None:
        """Prepare without filling in the template.

        Args:
            fill: Fills in the template.
            image_mark: The text that stands for an image in the rendering; None for a model that takes no images, whose
                messages are strings.
        """
        self._fill = fill
        self._image_mark = image_mark
        self._shapes: set[tuple[Any, ...]] = set()
        """Shapes of which nothing is dropped."""
        self._thinking: dict[str, bool] = {}

    def message(self, role: str, text: str) -> dict[str, Any]:
        """Return a message in the form of chat templates."""
        return {"role": role, "content": text if self._image_mark is None else [{"type": "text", "text": text}]}

    @functools.cached_property
    def takes_tools(self) -> bool:
        """Whether the template shows tools."""
        try:
            return _NAME in self._fill([self.message("user", "?")], tools=[_TOOL])
        except InvalidRequestError:
            return False

    @functools.cached_property
    def knows_tool_role(self) -> bool:
        """Whether the template has a form for tool replies, instead of a generic header with the role's name."""
        before = [self.message("user", "?"), self.message("assistant", "!")]
        try:
            reply, unknown = (self._fill([*before, self.message(role, "7")]) for role in ("tool", _NAME))
        except InvalidRequestError:
            return True
        return _NAME not in unknown or reply.replace("tool", _NAME) != unknown

    @functools.cached_property
    def call_format(self) -> CallFormat:
        """The form in which the template writes calls; hermes if it shows none."""
        call = {"type": "function", "function": {"name": _NAME, "arguments": {}}}
        try:
            shown = self._fill([self.message("user", "?"), {**self.message("assistant", ""), "tool_calls": [call]}])
        except InvalidRequestError:
            return "hermes"
        return "xml" if f"<function={_NAME}>" in shown else "hermes"

    def opens_thinking(self, template_kwargs: Mapping[str, Any]) -> bool:
        """Return whether the generation prompt opens `<think>` and leaves it open."""
        key = _key(template_kwargs)
        if key not in self._thinking:
            prompt = self._fill([self.message("user", "?")], template_kwargs=template_kwargs)
            if len(self._thinking) >= _MAX_SHAPES:
                self._thinking.clear()
            self._thinking[key] = prompt.rfind(OPEN) > prompt.rfind(CLOSE)
        return self._thinking[key]

    def drops_thoughts(self, chat: Sequence[dict[str, Any]], template_kwargs: Mapping[str, Any]) -> bool:
        """Return whether the template leaves out an assistant's thoughts once the messages of `chat` follow its turn.

        Raises:
            InvalidRequestError: the template rejects the messages.
        """
        return _THOUGHT not in self._fill([*self._thoughtful_turn, *chat], template_kwargs=template_kwargs)

    def opening(self, template_kwargs: Mapping[str, Any]) -> tuple[str, str]:
        """Return the generation prompt of a first turn, and its beginning once the turn's thoughts are left out.

        Raises:
            InvalidRequestError: the turn begins differently then.
        """
        question = self.message("user", "?")
        prompt = self._fill([question], template_kwargs=template_kwargs)
        later = self._fill([*self._thoughtful_turn, question], template_kwargs=template_kwargs)
        header = later.partition(_SAID)[0]
        if not prompt.startswith(header):
            raise InvalidRequestError(
                "the model's chat template shows an earlier turn in another form than it asks for one; set "
                "worker.strip_thinking = false"
            )
        return prompt, header

    @functools.cached_property
    def _thoughtful_turn(self) -> list[dict[str, Any]]:
        """A question and an answer with thoughts, in the template's form: in their own field, or as text."""
        question, said = self.message("user", "?"), self.message("assistant", _SAID)
        known = [question, {**said, "reasoning_content": _THOUGHT}]
        if _THOUGHT in self._fill(known, is_prompt=False):
            return known
        return [question, self.message("assistant", f"{OPEN}\n{_THOUGHT}\n{CLOSE}\n\n{_SAID}")]

    def require_shown(
        self, messages: Sequence[Message], *, has_tools: bool, template_kwargs: Mapping[str, Any], num_before: int = 0
    ) -> None:
        """Check that the template drops nothing.

        Args:
            messages: A conversation that the template has not rejected.
            has_tools: Whether tools are shown with it.
            template_kwargs: Other variables of the template.
            num_before: How many of the messages come before those that users know.

        Raises:
            InvalidRequestError: the tools, a text, an image or a call would be dropped, or the tool role is unknown.
        """
        if has_tools and not self.takes_tools:
            raise InvalidRequestError(
                "the model's chat template does not show tools, so the policy would not know that it can call them; "
                "describe them in the system message, and leave the task without tools"
            )
        roles = [message.role for message in messages]
        if "tool" in roles and not self.knows_tool_role:
            raise InvalidRequestError(
                f"message {roles.index('tool') - num_before} has the role tool, which the model's chat template does "
                "not know: its header would be one that the model never saw; give it the role user"
            )
        shapes = tuple(_shape(message) for message in messages)
        key = (shapes, has_tools, _key(template_kwargs))
        if key not in self._shapes:
            self._try(shapes, roles, has_tools, template_kwargs, num_before)
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes.add(key)

    def _try(
        self,
        shapes: Sequence["_Shape"],
        roles: Sequence[str],
        has_tools: bool,
        template_kwargs: Mapping[str, Any],
        num_before: int,
    ) -> None:
        fill = functools.partial(self._fill, tools=[_TOOL] if has_tools else (), template_kwargs=template_kwargs)
        try:
            shown = fill([self._chat(number, shape) for number, shape in enumerate(shapes)])
        except InvalidRequestError:
            return  # the template depends on the words, so a test says nothing about others
        for number, (_, pieces, num_calls) in enumerate(shapes):
            where = f"message {number - num_before}, of role {roles[number]}: the model's chat template drops"
            for index, piece in enumerate(pieces):
                if piece == "text" and _mark(number, index) not in shown:
                    raise InvalidRequestError(f"{where} its text; {_remedy(roles[number], num_calls)}")
            if any(_mark(number, len(pieces) + call) not in shown for call in range(num_calls)):
                raise InvalidRequestError(f"{where} its tool_calls; write them as text in the content")
        if self._image_mark is None:
            return
        num_shown = shown.count(self._image_mark)
        if num_shown == sum(pieces.count("image") for _, pieces, _ in shapes):
            return
        for number, (role, pieces, num_calls) in enumerate(shapes):
            bare = (role, tuple("text" if piece == "image" else piece for piece in pieces), num_calls)
            without = [*shapes[:number], bare, *shapes[number + 1 :]]
            less = fill([self._chat(index, shape) for index, shape in enumerate(without)]).count(self._image_mark)
            if num_shown - less != pieces.count("image"):
                raise InvalidRequestError(
                    f"message {number - num_before}, of role {role}: the model's chat template drops its images; show "
                    "them in a user's message"
                )

    def _chat(self, number: int, shape: "_Shape") -> dict[str, Any]:
        """Return a message of this shape, with a mark for each text and each call's name."""
        role, pieces, num_calls = shape
        content: list[dict[str, str]] = []
        for index, piece in enumerate(pieces):
            if piece == "image":
                content.append({"type": "image"})
            else:
                content.append({"type": "text", "text": _mark(number, index) if piece == "text" else ""})
        chat: dict[str, Any] = {"role": role, "content": content}
        if self._image_mark is None:
            chat["content"] = "".join(piece.get("text", "") for piece in content)
        if num_calls:
            names = [_mark(number, len(pieces) + call) for call in range(num_calls)]
            chat["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in names]
        return chat


_Shape = tuple[str, tuple[str, ...], int]
"""Role; text, image or blank for each part, adjacent texts joined; number of calls."""


def _shape(message: Message) -> _Shape:
    pieces: list[str] = []
    for part in message.parts:
        if not isinstance(part, TextPart):
            pieces.append("image")
            continue
        piece = "text" if part.text.strip() else "blank"
        if not pieces or pieces[-1] == "image":
            pieces.append(piece)
        elif piece == "text":
            pieces[-1] = piece
    return message.role, tuple(pieces), len(message.tool_calls)


def _mark(number: int, index: int) -> str:
    return f"penstock{number}x{index}x"


def _remedy(role: str, num_calls: int) -> str:
    if role == "system":
        return "put it into the first system message or into a user's"
    if role == "assistant" and num_calls:
        return "leave it out, or write the calls into it as text"
    return "give the message another role"


def _key(template_kwargs: Mapping[str, Any]) -> str:
    return json.dumps(template_kwargs, sort_keys=True, default=repr)
