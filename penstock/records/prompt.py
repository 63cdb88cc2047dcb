"""Prompts: what the trainer admits and a worker plays, and the identities on the bus."""

from typing import Literal

from penstock.records.record import Record


class TextPart(Record, frozen=True, tag="text", tag_field="type"):
    """Text inside a message."""

    text: str


class ImagePart(Record, frozen=True, tag="image", tag_field="type"):
    """An image inside a message: an index into the images that travel beside the messages."""

    index: int


class Message(Record, frozen=True):
    """One message of a conversation, in the roles that chat templates know."""

    role: Literal["system", "user", "assistant", "tool"]
    parts: tuple[TextPart | ImagePart, ...]


class Prompt(Record, frozen=True):
    """A dataset row made ready: one prompt group for a worker to play."""

    run_id: str
    index: int
    """Place in the run's order of admission, from 0; with `run_id` the identity of the group."""
    attempt: int
    """0, and one more each time the group was rejected as stale and admitted again."""
    incarnation: str
    """The start of the trainer that admitted it. A trainer that starts again puts what is outstanding back on the bus,
    which would take an id that it has seen, and perhaps removed the message of, for a repetition."""
    admitted_version: int
    """Published policy version at admission: nothing older may play it."""
    num_samples: int
    messages: tuple[Message, ...]
    images: tuple[bytes, ...]
    golds: tuple[str, ...]
    profile: str
    """The reward service's profile that judges it."""
    environment: str
    """The environment that plays it."""

    def __post_init__(self) -> None:
        if min(self.index, self.attempt, self.admitted_version) < 0 or self.num_samples < 1:
            raise ValueError("index, attempt and admitted_version must be >= 0 and num_samples >= 1")
        indices = [part.index for message in self.messages for part in message.parts if isinstance(part, ImagePart)]
        if indices != list(range(len(self.images))):
            raise ValueError(f"messages refer to images {indices}, but {len(self.images)} travel beside them")

    @property
    def group_id(self) -> str:
        """Identity of the group, the same over all attempts."""
        return group_id(self.run_id, self.index)

    @property
    def message_id(self) -> str:
        """Identity on the bus: one per admission, so that a group admitted again is not taken for a repetition."""
        return f"{self.group_id}/{self.attempt}/{self.incarnation}"


def group_id(run_id: str, index: int) -> str:
    """The identity of the run's `index`-th group."""
    return f"{run_id}/{index}"


def parse_message_id(message_id: str) -> tuple[str, int, int] | None:
    """Run, index and attempt of a prompt or group whose bytes cannot be decoded; None if it is no such id."""
    match message_id.split("/"):
        case [run_id, index, attempt, _] if index.isdecimal() and attempt.isdecimal():
            return run_id, int(index), int(attempt)
        case _:
            return None
