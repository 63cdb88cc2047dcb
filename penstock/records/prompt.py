"""Prompts, which the trainer admits and a worker plays, and the identity of their groups on the bus."""

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from penstock.names import TRAIN
from penstock.records.record import Envelope, Record

_MAX_VERIFIED_CHARS = 65_536
REQUEUED = "requeued"
"""First word of the id of a message that a person put back on its queue; its number and first id follow."""
_HASH = re.compile(r"[0-9a-f]{64}")


class TextPart(Record, frozen=True, kw_only=True, tag="text", tag_field="type"):
    """Text inside a message."""

    text: str


class ImagePart(Record, frozen=True, kw_only=True, tag="image", tag_field="type"):
    """An image inside a message: an index into the list of images beside the messages."""

    index: int


class ToolCall(Record, frozen=True, kw_only=True):
    """An assistant's call of a function."""

    name: str
    arguments: dict[str, Any]


class Message(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One message of a conversation, in the roles that chat templates know.

    Without tool calls it is encoded as before they were added.
    """

    role: Literal["system", "user", "assistant", "tool"]
    parts: tuple[TextPart | ImagePart, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    """An assistant's calls, which follow its text."""

    def __post_init__(self) -> None:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} has tool_calls; only the assistant's may")


def text_for_verifiers(messages: Sequence[Message]) -> str:
    """Return a conversation as verifiers read what was asked: the messages' texts, an image as `<image>`; of very long
    ones the end, as much as of a response."""
    texts = (
        "".join(part.text if isinstance(part, TextPart) else "<image>" for part in message.parts)
        for message in messages
    )
    return "\n\n".join(texts)[-_MAX_VERIFIED_CHARS:]


class GroupId(Record, frozen=True, kw_only=True):
    """The identity of one admission of a group."""

    run_id: str
    index: int
    """Position in the run's order of admission, from 0; with `run_id` the identity of the group."""
    attempt: int
    """0, plus one for each time the group was stale or lost and admitted again."""
    trainer_epoch: str
    """The start of the trainer that admitted it. A restarted trainer republishes outstanding groups; under their old
    ids the bus would drop them as repetitions of messages that it may no longer have."""

    def __post_init__(self) -> None:
        if min(self.index, self.attempt) < 0:
            raise ValueError(f"index = {self.index} and attempt = {self.attempt} must be >= 0")

    @property
    def group(self) -> str:
        """Identity of the group, the same over all attempts."""
        return f"{self.run_id}/{self.index}"

    @property
    def message(self) -> str:
        """Identity of the prompt and its group on the bus: one per admission, so that none is dropped as a copy."""
        return f"{self.group}/{self.attempt}/{self.trainer_epoch}"

    @property
    def scope(self) -> str:
        """The scope in which the group's images are stored (`penstock.bus.image_store`)."""
        return self.message.replace("/", ".")

    @classmethod
    def parse(cls, message_id: str) -> "GroupId | None":
        """Return the identity that `message` wrote; None if it is not one. For messages that cannot be decoded.

        What was put back on its queue (`requeue_letter`) has its first id at the end of its own.
        """
        words = message_id.split("/")
        while len(words) > 4 and words[0] == REQUEUED:
            words = words[2:]
        match words:
            case [run_id, index, attempt, epoch] if index.isdecimal() and attempt.isdecimal():
                return cls(run_id=run_id, index=int(index), attempt=int(attempt), trainer_epoch=epoch)
        return None


class Sampling(Record, frozen=True, kw_only=True):
    """Sampling parameters."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    max_new_tokens: int = 512
    """The most tokens in one turn."""


class Limits(Record, frozen=True, kw_only=True):
    """Budgets of each of a prompt's episodes; None: no limit. Exceeding one ends the episode."""

    max_turns: int | None = None
    max_tokens: int | None = None
    """The most tokens in a sequence, images expanded; never more than the engines accept."""
    max_observation_tokens: int | None = None
    """The most tokens, images expanded, in all observations after the first."""
    max_images: int | None = None
    """The most images, including the prompt's."""
    max_pixels: int | None = None
    """The most pixels in all images together, including the prompt's."""
    turn_timeout_s: float | None = None
    """Seconds for one turn; None: the rest of the episode."""
    episode_timeout_s: float | None = None
    """Seconds for the episode; never more than the worker's own bound."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} = {value} must be above 0, or None for no limit")


class Prompt(Envelope, frozen=True, kw_only=True):
    """A dataset row ready to be played: one prompt group for a worker."""

    id: GroupId
    admitted_version: int
    """Published policy version at admission: no older version may play it."""
    exact_version: int | None = None
    """The only policy version that may play it, for evaluations; None allows `admitted_version` and newer."""
    purpose: str = TRAIN
    num_samples: int
    sampling: Sampling
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """The tools that the policy may call, each as a JSON schema in OpenAI's form."""
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further arguments of the model's chat template."""
    images: tuple[str, ...]
    """Content hashes, in the order of the messages' image parts; stored under `id.scope`."""
    golds: tuple[str, ...]
    profile: str
    """The reward service's profile that judges it."""
    environment: str
    """The environment that plays it."""
    limits: Limits = Limits()
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    """The row's other columns, as JSON, for environments and reports."""
    seed_key: str = ""
    """What its tasks' seed is made from: of an evaluation the row, which draws the same in each. Empty: `id.group`."""

    def __post_init__(self) -> None:
        if self.admitted_version < 0 or self.num_samples < 1:
            raise ValueError("admitted_version must be >= 0 and num_samples >= 1")
        if self.exact_version is not None and self.exact_version < self.admitted_version:
            raise ValueError(f"exact_version = {self.exact_version} is below {self.admitted_version}, the admission's")
        indices = [part.index for message in self.messages for part in message.parts if isinstance(part, ImagePart)]
        if indices != list(range(len(self.images))):
            raise ValueError(f"messages refer to images {indices}, but {len(self.images)} stand beside them")
        check_hashes(self.images)

    @property
    def min_version(self) -> int:
        """The oldest policy version that may play it."""
        return self.admitted_version if self.exact_version is None else self.exact_version


def check_hashes(hashes: tuple[str, ...]) -> None:
    """Check that each is the content hash of an image.

    Raises:
        ValueError: one is not SHA-256 in hexadecimal digits.
    """
    for sha256 in hashes:
        if not _HASH.fullmatch(sha256):
            raise ValueError(f"image {sha256[:80]!r} must be a SHA-256 of 64 hexadecimal digits in lower case")
