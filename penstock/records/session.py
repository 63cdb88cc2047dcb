"""Sessions: an agent's requests for one sample, and the policy's answers (`penstock.bus.sessions`).

Shapes: N = new tokens of a prompt, with one placeholder id per image; S = tokens that the policy sampled.
"""

import hashlib
import re
import secrets
from typing import Any, Final, Literal, Self

import msgspec
import numpy as np

from penstock.records.prompt import GroupId, Limits, Sampling, check_hashes
from penstock.records.record import Envelope, Record
from penstock.records.sample import VersionSpan, check_sampled

SESSION_HEADER: Final = "x-penstock-session"
"""HTTP header that names the session at the base URL shared by all samples."""
LAST_TOKENS_S: Final = 75.0
"""Seconds after its time that a sample without an answer waits for routers to record the tokens of one in progress.
They look at a session every minute, and later every 5 s; the rest is for storing them."""

_ID = re.compile(r"([A-Za-z0-9_-]{1,200})\.([0-9a-f]{32})")


class SessionId(Record, frozen=True, kw_only=True):
    """The identity of one session; only a client that was given it can use the session."""

    sample_key: str
    """The sample that it plays: one word, the same for all workers' attempts to play that sample."""
    nonce: str
    """Random, and different for each attempt."""

    @property
    def sample(self) -> int | None:
        """Number of the sample in its group; None if it is not one that `new` made."""
        number = self.sample_key.rpartition("-")[2]
        return int(number) if number.isdecimal() else None

    def __str__(self) -> str:
        """Return the identity as it stands in URLs."""
        return f"{self.sample_key}.{self.nonce}"

    @classmethod
    def new(cls, group: GroupId, sample: int) -> Self:
        """Return another identity for `sample` of `group`.

        A run's groups and those of its evaluations are numbered apart, by `run_id`.
        """
        run = hashlib.sha256(group.run_id.encode()).hexdigest()[:12]
        sample_key = f"{run}-{group.index}-{group.attempt}-{group.trainer_epoch}-{sample}"
        return cls(sample_key=sample_key, nonce=secrets.token_hex(16))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the identity that `str` wrote; None if the text is not one."""
        match = _ID.fullmatch(text)
        return None if match is None else cls(sample_key=match[1], nonce=match[2])


class SessionState(Envelope, frozen=True, kw_only=True):
    """The current session of a sample. Another session of the same sample takes its place."""

    nonce: str
    """The nonce of the session's id."""
    is_ending: bool = False
    """Whether its time is over while it has no answer: routers record the tokens that came, and take no more calls."""
    is_closed: bool = False
    group: str
    """Identity of the group's admission, which routes its samples to the same replica."""
    scope: str
    """The scope in which its images are stored."""
    images: tuple[str, ...] = ()
    """Content hashes of the images that are stored there already: the prompt's."""
    sampling: Sampling
    """Sampling of every answer, whatever the agent asks for; `max_new_tokens` is the most that it may ask for."""
    min_version: int
    """The oldest policy version that may answer."""
    exact_version: int | None = None
    """The only version that may answer; None: any from `min_version` on."""
    tools: tuple[dict[str, Any], ...] = ()
    """The tools that the policy may call if a call brings none."""
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Default arguments of the chat template; those of a call override them."""
    limits: Limits = Limits()
    """`max_turns`: the most answers, counted when a call begins; the others bound each conversation: its tokens, images
    expanded, those after its first prompt except the policy's answers, its images and their pixels."""
    timeout_s: float = 0.0
    """Seconds of the sample's time, from when the session was opened; its calls may wait for a replica for as long. 0:
    not known. After it the session stays open while verdicts that the agent asked for are awaited, and for
    `LAST_TOKENS_S` while there is no answer."""


class SessionFailure(Envelope, frozen=True, kw_only=True):
    """Why a call of a session failed that would fail again, however often it is tried."""

    reason: str
    is_poison: bool
    """Whether it broke every replica that tried it; else it was refused."""


class SessionCall(Envelope, frozen=True, kw_only=True):
    """One of the policy's answers in a session. Calls are numbered by their order in the stream."""

    request_id: str
    choice: int
    """Number among the answers to one request, from 0."""
    continues: int = 0
    """Number of the call whose tokens come first; 0: `input_ids` are the whole prompt."""
    conversation: str
    """Digest of the conversation up to and including this answer, with its tools."""
    answer: str
    """Digest of the answer alone."""
    input_ids: np.ndarray
    """int32[N]: the part of the prompt after the prompt and the answer of the call that it continues."""
    num_begun: int = 0
    """How many of the last `input_ids` belong to the answer: the beginning of a forced tool call, which the router put
    there for the policy."""
    images: tuple[str, ...] = ()
    """Content hashes of the images in `input_ids`."""
    output_ids: np.ndarray
    """int32[S]: all tokens that the policy sampled."""
    logprobs: np.ndarray
    """float32[S]"""
    version_spans: tuple[VersionSpan, ...]
    """Their lengths add up to S."""
    finish_reason: Literal["stop", "length", "deadline"]
    """deadline: the session was ending, and these are the tokens that had come."""
    num_prompt_tokens: int
    """Tokens of the whole prompt as the engine counted them, image placeholders expanded."""
    num_cached_tokens: int
    replica_id: str = ""
    """The engine that finished the answer; empty: not known."""
    started_at: float = 0.0
    """When the call came, by the router's clock, in seconds since 1970; 0: not known."""
    waited_s: float = 0.0
    """Seconds from there to the first tokens: waits for NATS, queues, retries and prefill."""
    generated_s: float = 0.0
    """Seconds from the first chunk to the last."""

    def __post_init__(self) -> None:
        check_sampled(self.input_ids, self.output_ids, self.logprobs, self.version_spans)
        check_hashes(self.images)
        if not 0 <= self.num_begun <= len(self.input_ids):
            raise ValueError(f"num_begun = {self.num_begun} must be from 0 to {len(self.input_ids)}, as input_ids has")
