"""The policy's answers in one session, and the prompt of its next answer. Pure but for the rendering.

Invariant: the policy's own text is never tokenised again. A prompt begins with the ids of the longest recorded
conversation that its messages continue. After it, and in conversations that were rewritten, each answer that the policy
gave in this session stands as the ids that it sampled, after those with which the router began it.
"""

import array
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.model.chat.chat_template import Renderer
from penstock.records import ImagePart, Message, SessionCall
from services.router.frontends.openai.sessions.digests import digest_next, digest_start


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A client's chat."""

    messages: Sequence[Message]
    images: Sequence[str]
    """Content hashes, as the messages' image parts number them."""
    tools: Sequence[Mapping[str, Any]]
    template_kwargs: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NextPrompt:
    """The prompt of an answer, and what its record needs to know about it."""

    continues: int
    """Number of the call whose tokens come first; 0: none."""
    input_ids: "array.array[int]"
    """int32 ids of the whole prompt."""
    num_prefix: int
    """How many of them are the prompt and answer of that call."""
    prefix_images: Sequence[str]
    added_images: Sequence[str]
    num_expanded: int
    """Tokens that the engine added to the prompt of that call for its images."""
    num_observed: int
    """Tokens, images expanded, that conversation got after its first prompt, except the policy's answers."""
    conversation: str
    """Digest of the messages."""

    @property
    def added_ids(self) -> "array.array[int]":
        """The ids after those of that call."""
        return self.input_ids[self.num_prefix :]

    @property
    def images(self) -> list[str]:
        """Content hashes of the whole prompt's images."""
        return [*self.prefix_images, *self.added_images]

    @property
    def num_tokens(self) -> int:
        """Known tokens of the prompt: a new image counts 1."""
        return len(self.input_ids) + self.num_expanded


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The part of a recorded call that prompts need."""

    continues: int
    input_ids: np.ndarray
    num_begun: int
    output_ids: np.ndarray
    images: tuple[str, ...]
    num_prompt_tokens: int

    @property
    def ids(self) -> list[int]:
        """The whole answer: the ids with which the router began it, and those that the policy sampled."""
        begun = self.input_ids[len(self.input_ids) - self.num_begun :]
        return [*begun.tolist(), *self.output_ids.tolist()]


class SessionHistory:
    """The recorded calls of one session. One thread can add them while another renders."""

    def __init__(self, *, known_since: float = 0.0) -> None:
        """Start empty; the session has been known since `known_since`, by `time.monotonic()`."""
        self.known_since = known_since
        self._answers: dict[int, _Answer] = {}
        self._by_conversation: dict[str, int] = {}
        self._by_answer: dict[str, list[int]] = {}
        self.last_number = 0
        """Number of the last call that was added."""
        self.size_bytes = 0

    def __len__(self) -> int:
        """Return the number of calls."""
        return len(self._answers)

    def add(self, number: int, call: SessionCall) -> None:
        """Add a call, unless it is known."""
        if number <= self.last_number:
            return
        self._answers[number] = _Answer(
            continues=call.continues,
            input_ids=call.input_ids,
            num_begun=call.num_begun,
            output_ids=call.output_ids,
            images=call.images,
            num_prompt_tokens=call.num_prompt_tokens,
        )
        # Of equal conversations, keep the last: an agent that asks again continues with the new answer.
        self._by_conversation[call.conversation] = number
        self._by_answer.setdefault(call.answer, []).append(number)
        self.last_number = number
        self.size_bytes += call.input_ids.nbytes + call.output_ids.nbytes

    def next_prompt(self, chat: Chat, renderer: Renderer) -> NextPrompt:
        """Return the prompt of the answer to `chat`.

        Raises:
            InvalidRequestError: the template refuses the messages, or cannot continue a conversation.
        """
        digests = [digest_start(chat.tools, chat.template_kwargs)]
        for message in chat.messages:
            digests.append(digest_next(digests[-1], message, chat.images))
        known = (
            num_known for num_known in range(len(chat.messages), 0, -1) if digests[num_known] in self._by_conversation
        )
        num_known = next(known, 0)
        number = self._by_conversation[digests[num_known]] if num_known else 0
        ids, prefix_images = self._tokens_of(number)
        num_prefix = len(ids)
        added_ids, added_images = self._render(chat, num_known, ids, len(prefix_images), renderer)
        ids.extend(added_ids)
        return NextPrompt(
            continues=number,
            input_ids=ids,
            num_prefix=num_prefix,
            prefix_images=prefix_images,
            added_images=added_images,
            num_expanded=self._num_expanded(number, num_prefix),
            num_observed=self._num_observed(number),
            conversation=digests[-1],
        )

    def _tokens_of(self, number: int) -> tuple["array.array[int]", list[str]]:
        """Return prompt and answer of a call, with the images; empty for 0."""
        parts, images = list[np.ndarray](), list[tuple[str, ...]]()
        while number:
            answer = self._answers[number]
            parts += [answer.output_ids, answer.input_ids]
            images.append(answer.images)
            number = answer.continues
        ids = array.array("i")
        for part in reversed(parts):
            ids.frombytes(part.astype(np.int32, copy=False).tobytes())
        return ids, [each for part in reversed(images) for each in part]

    def _num_expanded(self, number: int, num_known: int) -> int:
        """Return the tokens that the engine added to the `num_known` ids of a call's prompt and answer."""
        if not number:
            return 0
        answer = self._answers[number]
        return answer.num_prompt_tokens + len(answer.output_ids) - num_known

    def _num_observed(self, number: int) -> int:
        num_tokens = 0
        while number and (before := self._answers[number].continues):
            answer = self._answers[number]
            known = self._answers[before].num_prompt_tokens + len(self._answers[before].output_ids)
            num_tokens += answer.num_prompt_tokens - answer.num_begun - known
            number = before
        return num_tokens

    def _said(self, messages: Sequence[Message], first: int) -> dict[int, int]:
        """Return the number of the call that gave each answer among the messages from `first` on, by its index.

        Several answers may say the same. Then the last such message gets the last of them, the message before it the
        one before, and so on, because histories lose their beginning. If there are more messages than answers, the
        earliest messages get the first answer.
        """
        found, num_met = dict[int, int](), Counter[str]()
        for index in range(len(messages) - 1, first - 1, -1):
            if messages[index].role != "assistant":
                continue
            digest = digest_next("", messages[index])
            if numbers := self._by_answer.get(digest):
                num_met[digest] += 1
                found[index] = numbers[max(0, len(numbers) - num_met[digest])]
        return found

    def _render(
        self, chat: Chat, num_known: int, prefix_ids: Sequence[int], num_prefix_images: int, renderer: Renderer
    ) -> tuple[list[int], list[str]]:
        """Return the ids of the messages after the first `num_known`, following `prefix_ids`, and their images."""
        ids, images = list[int](), list[str]()
        texts = list[Message]()

        def render() -> None:
            shown = [chat.images[index] for index in _images_of(texts)]
            template: dict[str, Any] = {"num_images": len(shown), "template_kwargs": chat.template_kwargs}
            if last_id := (ids or prefix_ids)[-1:]:
                num_earlier = num_prefix_images + len(images)
                ids.extend(renderer.render_continuation(last_id[0], texts, num_earlier_images=num_earlier, **template))
            else:
                ids.extend(renderer.render_prompt(texts, tools=chat.tools, **template))
            images.extend(shown)

        said = self._said(chat.messages, max(1, num_known))
        for index, message in enumerate(chat.messages[num_known:], start=num_known):
            number = said.get(index)
            if number is None:
                texts.append(message)
                continue
            render()
            ids.extend(self._answers[number].ids)
            texts.clear()
        render()
        return ids, images


def _images_of(messages: Sequence[Message]) -> list[int]:
    """Return the numbers of the images that messages show, in order."""
    return [part.index for message in messages for part in message.parts if isinstance(part, ImagePart)]
