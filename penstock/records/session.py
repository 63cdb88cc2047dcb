"""Sessions: what an agent asks of the policy for one sample, and what the policy answered (`penstock.bus.sessions`).

Shapes: N = tokens of a prompt that are new in it, with one placeholder id per image; S = tokens that the policy
sampled.
"""

import re
import secrets
from typing import Any, Literal, Self

import msgspec
import numpy as np

from penstock.records.prompt import GroupId, Limits, Sampling, check_hashes
from penstock.records.record import Envelope, Record
from penstock.records.sample import VersionSpan, check_sampled

_ID = re.compile(r"([A-Za-z0-9_-]{1,200})\.([0-9a-f]{32})")


class SessionId(Record, frozen=True, kw_only=True):
    """The identity of one session; only who was told it can use it."""

    sample_key: str
    """The sample that it plays: one word, the same for all attempts of workers to play that sample."""
    nonce: str
    """Random; another one for each attempt."""

    def __str__(self) -> str:
        """As it stands in URLs."""
        return f"{self.sample_key}.{self.nonce}"

    @classmethod
    def new(cls, group: GroupId, sample: int) -> Self:
        """Another identity for `sample` of `group`."""
        sample_key = f"{group.index}-{group.attempt}-{group.trainer_epoch}-{sample}"
        return cls(sample_key=sample_key, nonce=secrets.token_hex(16))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The identity that `str` wrote; None if the text is not one."""
        match = _ID.fullmatch(text)
        return None if match is None else cls(sample_key=match[1], nonce=match[2])


class SessionState(Envelope, frozen=True, kw_only=True):
    """The current session of a sample. Another session of the same sample takes its place."""

    nonce: str
    """Of its id."""
    is_closed: bool = False
    group: str
    """Identity of the group's admission, which brings its samples to the same replica."""
    scope: str
    """Where its images are stored."""
    images: tuple[str, ...] = ()
    """Content hashes of those that are stored there already: the prompt's."""
    sampling: Sampling
    """How every answer is drawn, whatever the agent asks for; `max_new_tokens` is the most that it may ask for."""
    min_version: int
    """The oldest policy version that may answer."""
    exact_version: int | None = None
    """The only one that may; None for any from `min_version` on."""
    tools: tuple[dict[str, Any], ...] = ()
    """What the policy may call in calls that bring no tools."""
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of the chat template, under those of a call."""
    limits: Limits = Limits()
    """`max_turns`: most answers; `max_tokens`: most tokens of a conversation, images expanded."""
    timeout_s: float = 0.0
    """How long it stays open at most, from when it was opened: so long its calls may wait for a replica. 0: it is not
    known."""


class SessionCall(Envelope, frozen=True, kw_only=True):
    """One answer of the policy in a session. Calls are numbered by their order in the stream."""

    request_id: str
    choice: int
    """Number among the answers to one request, from 0."""
    continues: int = 0
    """Number of the call whose tokens come first; 0: `input_ids` are the whole prompt."""
    conversation: str
    """Digest of the conversation up to this answer, which is included, with its tools."""
    answer: str
    """Digest of the answer alone."""
    input_ids: np.ndarray
    """int32[N]: what the prompt has after the prompt and the answer of the call that it continues."""
    images: tuple[str, ...] = ()
    """Content hashes of the images in `input_ids`."""
    output_ids: np.ndarray
    """int32[S]: all that the policy sampled."""
    logprobs: np.ndarray
    """float32[S]"""
    version_spans: tuple[VersionSpan, ...]
    """They add up to S."""
    finish_reason: Literal["stop", "length"]
    num_prompt_tokens: int
    """The whole prompt as the engine counted it, image placeholders expanded."""
    num_cached_tokens: int

    def __post_init__(self) -> None:
        check_sampled(self.input_ids, self.output_ids, self.logprobs, self.version_spans)
        check_hashes(self.images)
