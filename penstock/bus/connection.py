"""A run's streams and buckets on a NATS server, or on a cluster of them.

A publish is retried until the server has stored it; its message id makes repetitions harmless. Stored messages survive
a kill of any process, including the server, but for those of unsynced streams. A server that comes back without its
store is an error.
"""

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple, TypeVar

import nats.js.errors
import structlog
from nats.aio.client import Client
from nats.js import JetStreamContext, api
from nats.js.kv import KeyValue

from penstock.bus.answers import ANSWER_S, until_answered
from penstock.bus.buckets.unsynced import UnsyncedStreams
from penstock.bus.cluster.creation import create, describe_other_settings
from penstock.bus.failures import BUS_ERRORS, Presence, describe
from penstock.bus.nats_client import connected_client
from penstock.config import BusConfig
from penstock.errors import InvalidRequestError, SetupError, UnavailableError
from penstock.runtime.security import Security

log = structlog.get_logger()

StoredT = TypeVar("StoredT")

BUCKETS = ("replicas", "locks", "policy", "deaths")
"""The run's key-value buckets."""
_CONNECT_TIMEOUT_S = 10.0
"""Limit of the first connection: a starting nats-server listens within a second or two."""
_DUPLICATE_WINDOW_S = 600.0
_DEAD_LETTER_AGE_S = 30 * 24 * 3600.0
_DEAD_LETTER_BYTES = 2 * 2**30
"""Dead letters wait for a person. The oldest are dropped beyond this total size, or beyond their age limit."""
_PUBLISH_TIMEOUT_S = 5.0
_CHANGE_REPLICAS = "set bus.replicas to that, change the stream (`nats stream edit --replicas`)"
_MAX_RECORD_BYTES = 32 * 2**20
"""JetStream's file store refuses larger records, whatever max_payload says."""
_OVERHEAD_BYTES = 4096
"""An upper bound of a message's headers, subject and JetStream's own fields, without its id. The headers of a dead
letter include a reason of up to 2,000 bytes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One of a run's streams."""

    name: str
    subject: str
    retention: api.RetentionPolicy


class Stored(NamedTuple):
    """What the server says of a message that it has stored."""

    is_new: bool
    """Whether no message of the same id was stored before."""
    sequence: int
    """Its number in the stream."""


def _groups(run: str) -> Stream:
    return Stream(name=f"{run}_GROUPS", subject=f"{run}.groups", retention=api.RetentionPolicy.WORK_QUEUE)


class Bus:
    """A run's part of a NATS server. Names begin with the run's name, so that several runs can share a server."""

    def __init__(self, client: Client, config: BusConfig, run: str) -> None:
        """Wrap a connected client; use `connect`."""
        self.config = config
        self._client = client
        self._js: JetStreamContext = client.jetstream(timeout=_PUBLISH_TIMEOUT_S)
        self._unsynced = UnsyncedStreams(client, timeout=_PUBLISH_TIMEOUT_S)
        self._run = run
        work = api.RetentionPolicy.WORK_QUEUE
        self.prompts = Stream(name=f"{run}_PROMPTS", subject=f"{run}.prompts", retention=work)
        self.groups = _groups(run)
        self.dead = Stream(name=f"{run}_DEAD", subject=f"{run}.dead", retention=api.RetentionPolicy.LIMITS)
        self.images = Stream(name=f"{run}_IMAGES", subject=f"{run}.images", retention=api.RetentionPolicy.LIMITS)
        self.calls = Stream(name=f"{run}_CALLS", subject=f"{run}.calls", retention=api.RetentionPolicy.LIMITS)
        self.sessions = Stream(name=f"{run}_SESSIONS", subject=f"{run}.sessions", retention=api.RetentionPolicy.LIMITS)
        self.spans = Stream(name=f"{run}_SPANS", subject=f"{run}.spans", retention=api.RetentionPolicy.LIMITS)
        self.streams = (self.prompts, self.groups, self.images, self.calls, self.sessions, self.spans, self.dead)
        """All of them; each exists once a process has needed it."""

    @property
    def client(self) -> Client:
        """The connection, for features that the JetStream context lacks."""
        return self._client

    @property
    def jetstream(self) -> JetStreamContext:
        """The JetStream context, for features that this class lacks."""
        return self._js

    @property
    def unsynced(self) -> JetStreamContext:
        """The JetStream context that adds streams which the server does not sync message by message; see
        `UnsyncedStreams`."""
        return self._unsynced

    def presence(self, what: str, look: Callable[[], Awaitable[object]]) -> Presence:
        """Return a check that the server still has something; see `Presence`."""
        return Presence(self._client, what=what, url=self.config.url, look=look)

    async def ensure_streams(self) -> None:
        """Create the run's streams if they do not exist.

        Raises:
            SetupError: a stream exists with other settings, or cannot be created.
        """
        for stream in (self.prompts, self.groups, self.dead):
            config = api.StreamConfig(
                name=stream.name,
                subjects=[stream.subject],
                retention=stream.retention,
                storage=api.StorageType.FILE,
                duplicate_window=_DUPLICATE_WINDOW_S,
                max_age=_DEAD_LETTER_AGE_S if stream is self.dead else None,
                max_bytes=_DEAD_LETTER_BYTES if stream is self.dead else None,
            )
            await self.ensure_stream(config)

    async def ensure_stream(self, config: api.StreamConfig, *, update: bool = False) -> None:
        """Create a stream with as many replicas as the run has, if it does not exist.

        Args:
            config: The stream; its replicas are set here.
            update: Whether to give an existing stream these settings; never its replicas.

        Raises:
            SetupError: the stream exists with other settings, or cannot be created.
        """
        config = config.evolve(num_replicas=self.config.replicas)
        assert config.name is not None
        name, what = config.name, f"stream {config.name}"
        try:
            await create(self.config, what, lambda: self._js.add_stream(config), passing=nats.js.errors.BadRequestError)
        except nats.js.errors.BadRequestError as error:
            found = await self._replicas_of(name)
            if update and found in (None, self.config.replicas):
                await create(self.config, what, lambda: self._js.update_stream(config))
                return
            described = describe_other_settings(what, error, found=found, wanted=self.config.replicas)
            remedy = _CHANGE_REPLICAS if found not in (None, self.config.replicas) else "delete it (`nats stream rm`)"
            raise SetupError(f"{described}; {remedy} or choose another run.name") from None

    async def _replicas_of(self, stream: str) -> int | None:
        """Return how many servers store a stream; None if it is not there or the server does not answer."""
        try:
            return (await self._js.stream_info(stream)).config.num_replicas
        except BUS_ERRORS:
            return None

    async def bucket(self, name: str, *, ttl_s: float | None = None) -> KeyValue:
        """Return the run's KV bucket `name`, creating it if needed; values expire `ttl_s` after their last write, and
        one server does not sync them to the disk one by one.

        Raises:
            SetupError: it exists with other settings, or cannot be created.
        """
        full_name = f"{self._run}_{name}"
        # Without direct reads: followers answer those, and may be behind what was written.
        config = api.KeyValueConfig(bucket=full_name, history=1, ttl=ttl_s, replicas=self.config.replicas, direct=False)
        js = self._unsynced if ttl_s is not None and self.config.replicas == 1 else self._js
        try:
            return await create(
                self.config,
                f"bucket {full_name}",
                lambda: js.create_key_value(config),
                passing=nats.js.errors.BadRequestError,
            )
        except nats.js.errors.BadRequestError as error:
            found = await self._replicas_of(f"KV_{full_name}")
            described = describe_other_settings(f"bucket {full_name}", error, found=found, wanted=self.config.replicas)
            raise SetupError(
                f"{described}; give every process of the run the same [bus] section, or choose another run.name"
            ) from None

    async def publish(
        self, stream: Stream, payload: bytes, *, message_id: str, headers: Mapping[str, str] | None = None
    ) -> Stored:
        """Store `payload` once; it is not new if `message_id` was stored before.

        Raises:
            InvalidRequestError: the payload is larger than the server accepts.
            SetupError: the server no longer has the stream.
        """
        # A dead letter fits if its message did: room is reserved for its headers.
        if stream is not self.dead and len(payload) > self.max_payload_bytes(message_id):
            raise InvalidRequestError(
                f"message {message_id} of {len(payload)} bytes is over what the NATS server takes (max_payload = "
                f"{self._client.max_payload}); raise max_payload in its configuration (JetStream takes at most "
                f"{_MAX_RECORD_BYTES}), or make groups smaller"
            )
        headers = {**(headers or {}), "Nats-Msg-Id": message_id}
        presence = self.presence(f"stream {stream.name}", lambda: self._js.stream_info(stream.name))
        publish = functools.partial(self._js.publish, stream.subject, payload, headers=headers)
        ack = await self._stored(message_id, publish, presence)
        return Stored(is_new=not ack.duplicate, sequence=ack.seq)

    async def holds(self, stream: Stream, message_id: str, sequence: int) -> bool:
        """Return whether the stream still has a message, by its id and the number under which it was stored.

        Raises:
            UnavailableError: the server does not answer.
        """
        try:
            message = await self._js.get_msg(stream.name, seq=sequence)
        except nats.js.errors.NotFoundError:
            return False
        except BUS_ERRORS as error:
            raise UnavailableError(f"stream {stream.name} cannot be read: {describe(error)}") from None
        # A server that has lost it may have used the number again.
        return (message.headers or {}).get("Nats-Msg-Id") == message_id

    async def replace(self, stream: Stream, subject: str, payload: bytes) -> None:
        """Store `payload` under `subject` of `stream`, replacing what a stream of one message per subject had there.

        Raises:
            InvalidRequestError: the payload is larger than the server accepts.
            SetupError: the server no longer has the stream.
        """
        if len(payload) > self.max_payload_bytes(subject):
            raise InvalidRequestError(
                f"{subject}: {len(payload)} bytes are more than the NATS server takes (max_payload = "
                f"{self._client.max_payload}, JetStream at most {_MAX_RECORD_BYTES}); make it smaller"
            )
        presence = self.presence(f"stream {stream.name}", lambda: self._js.stream_info(stream.name))
        await self._stored(subject, lambda: self._js.publish(subject, payload), presence)

    async def put(self, bucket: KeyValue, key: str, value: bytes) -> None:
        """Set a value of a bucket, retrying while the server is unreachable.

        Raises:
            SetupError: the server no longer has the bucket.
        """
        await self.retried(f"write of {key}", lambda: bucket.put(key, value), bucket)

    async def retried(self, what: str, ask: Callable[[], Awaitable[StoredT]], bucket: KeyValue) -> StoredT:
        """Retry a bucket operation until the server answers; it must be safe to repeat after it succeeded.

        Raises:
            SetupError: the server no longer has the bucket.
        """
        return await self._stored(what, ask, self.presence(f"the bucket for the {what}", bucket.status))

    async def _stored(self, what: str, ask: Callable[[], Awaitable[StoredT]], presence: Presence) -> StoredT:
        """Retry until the server confirms; it must be safe to ask again where an answer was lost."""
        while True:
            try:
                return await ask()
            except BUS_ERRORS as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # nats-py swallows it where it flushes what is large
                    raise asyncio.CancelledError from None
                if self._client.is_closed:
                    raise UnavailableError(f"the connection to NATS closed before {what} was stored") from None
                log.warning("bus.store_retried", what=what, error=repr(error))
                await presence.check()
                await asyncio.sleep(0.5)

    def max_payload_bytes(self, message_id: str) -> int:
        """Return the most bytes that `publish` accepts; the server also counts headers and JetStream's fields."""
        return min(self._client.max_payload, _MAX_RECORD_BYTES) - len(message_id.encode()) - _OVERHEAD_BYTES

    async def purge(self, stream: Stream) -> int:
        """Remove every message of the stream, retrying while the server is unreachable; return how many there were.

        Raises:
            SetupError: the server no longer has the stream.
        """

        async def ask() -> int:
            count = (await self._js.stream_info(stream.name)).state.messages
            await self._js.purge_stream(stream.name)
            return int(count)

        presence = self.presence(f"stream {stream.name}", lambda: self._js.stream_info(stream.name))
        return await self._stored(f"purge of {stream.name}", ask, presence)

    async def delete_run(self) -> None:
        """Remove the run's streams and buckets with all that they hold, whoever uses them.

        Raises:
            nats.errors.Error: the server does not answer, or a cluster elects no leader; call it again.
        """
        buckets = (f"KV_{self._run}_{bucket}" for bucket in BUCKETS)
        for name in (*(stream.name for stream in self.streams), *buckets):
            with suppress(nats.js.errors.NotFoundError):
                await until_answered(self.config, f"removal of {name}", functools.partial(self._js.delete_stream, name))


@asynccontextmanager
async def connect(
    config: BusConfig, *, run: str, security: Security | None = None, timeout_s: float | None = None
) -> AsyncIterator[Bus]:
    """Connect to a server of `config` during the context, and reconnect without limit.

    Args:
        config: The servers.
        run: Name of the run.
        security: Token and TLS; None: the tokens of the environment.
        timeout_s: Limit of the first connection; None: 10 s, and for a cluster as long as an election may take.

    Raises:
        AccessError: the server refuses the token.
        SetupError: no server answers within `timeout_s`, or it has no JetStream.
    """
    if timeout_s is None:
        timeout_s = ANSWER_S if config.is_cluster else _CONNECT_TIMEOUT_S
    security = security or Security.from_environment()
    async with connected_client(config, security, stream=_groups(run).name, timeout_s=timeout_s) as client:
        yield Bus(client, config, run)
