"""One connection to NATS, with the run's streams and buckets.

A publish is retried until the server has stored it; its message id makes a repetition harmless. What was stored
survives a kill of any process, the server's included; a server that comes back without its store is an error.
"""

import asyncio
import dataclasses
import functools
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import nats
import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client
from nats.js import JetStreamContext, api
from nats.js.kv import KeyValue

from penstock.bus.failures import BUS_ERRORS, Presence, setting_up
from penstock.config import BusConfig
from penstock.errors import AccessError, InvalidRequestError, SetupError, UnavailableError
from penstock.runtime.process import end_task
from penstock.runtime.security import NATS_TOKEN, TOKEN, Security

log = structlog.get_logger()

StoredT = TypeVar("StoredT")

_REFUSED = "Authorization Violation"
"""What nats-server says to who has not its token."""
_REFUSAL = f"token missing or wrong; set {NATS_TOKEN}, or {TOKEN} where both are the same"

_DUPLICATE_WINDOW_S = 600.0
_DEAD_LETTER_AGE_S = 30 * 24 * 3600.0
_DEAD_LETTER_BYTES = 2 * 2**30
"""Dead letters are for a person to look at: the oldest go when they are older than this, or more than this together."""
_PUBLISH_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 2.0
_CLIENT_TASKS = ("_reconnection_task", "_reading_task", "_ping_interval_task", "_flusher_task")
"""What keeps a connection of nats-py alive."""
_MAX_RECORD_BYTES = 32 * 2**20
"""JetStream's file store refuses larger records, whatever max_payload says."""
_OVERHEAD_BYTES = 4096
"""More than the headers, subject and JetStream's own fields of a message take, its id aside. A dead letter's headers
include a reason of up to 2,000 bytes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One of a run's streams, by what it carries."""

    name: str
    subject: str
    retention: api.RetentionPolicy


class Bus:
    """A run's part of a NATS server: names carry the run's, so that runs share a server without meeting."""

    def __init__(self, client: Client, config: BusConfig, run: str) -> None:
        """Wrap a connected client; use `connect`."""
        self.config = config
        self._client = client
        self._js: JetStreamContext = client.jetstream(timeout=_PUBLISH_TIMEOUT_S)
        self._run = run
        work = api.RetentionPolicy.WORK_QUEUE
        self.prompts = Stream(name=f"{run}_PROMPTS", subject=f"{run}.prompts", retention=work)
        self.groups = Stream(name=f"{run}_GROUPS", subject=f"{run}.groups", retention=work)
        self.dead = Stream(name=f"{run}_DEAD", subject=f"{run}.dead", retention=api.RetentionPolicy.LIMITS)
        self.images = Stream(name=f"{run}_IMAGES", subject=f"{run}.images", retention=api.RetentionPolicy.LIMITS)
        self.calls = Stream(name=f"{run}_CALLS", subject=f"{run}.calls", retention=api.RetentionPolicy.LIMITS)

    @property
    def client(self) -> Client:
        """The connection itself, for what JetStream's context has no method for."""
        return self._client

    @property
    def jetstream(self) -> JetStreamContext:
        """The JetStream context, for what this class has no method for."""
        return self._js

    def presence(self, what: str, look: Callable[[], Awaitable[object]]) -> Presence:
        """What tells whether this server still has something; see `Presence`."""
        return Presence(self._client, what=what, url=self.config.url, look=look)

    async def ensure_streams(self) -> None:
        """Create the run's streams where they do not exist.

        Raises:
            SetupError: a stream exists with other settings, or the server does not make it.
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
            try:
                with setting_up(f"stream {stream.name}", self.config.url, passing=nats.js.errors.BadRequestError):
                    await self._js.add_stream(config)
            except nats.js.errors.BadRequestError as error:
                raise SetupError(
                    f"stream {stream.name} exists with other settings ({error.description}); delete it "
                    "(`nats stream rm`) or choose another run.name"
                ) from None

    async def bucket(self, name: str, *, ttl_s: float | None = None) -> KeyValue:
        """The run's KV bucket `name`; values vanish `ttl_s` after their last write.

        Raises:
            SetupError: it exists with other settings, or the server does not make it.
        """
        full_name = f"{self._run}_{name}"
        config = api.KeyValueConfig(bucket=full_name, history=1, ttl=ttl_s)
        try:
            with setting_up(f"bucket {full_name}", self.config.url, passing=nats.js.errors.BadRequestError):
                return await self._js.create_key_value(config)
        except nats.js.errors.BadRequestError as error:
            raise SetupError(
                f"bucket {full_name} exists with other settings ({error.description}); give every process of the run "
                "the same [bus] section, or choose another run.name"
            ) from None

    async def publish(
        self, stream: Stream, payload: bytes, *, message_id: str, headers: Mapping[str, str] | None = None
    ) -> bool:
        """Store `payload` once and return whether it was new; false if `message_id` was stored before.

        Raises:
            InvalidRequestError: the payload is larger than the server takes.
            SetupError: the server has the stream no more.
        """
        # A dead letter fits where its message did: room is kept for its headers.
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
        return not ack.duplicate

    async def replace(self, stream: Stream, subject: str, payload: bytes) -> None:
        """Store `payload` under `subject` of `stream`, in place of what a stream of one message per subject had there.

        Raises:
            InvalidRequestError: the payload is larger than the server takes.
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
        """Set a value of a bucket, waiting out a server that is away.

        Raises:
            SetupError: the server has the bucket no more.
        """
        await self.retried(f"write of {key}", lambda: bucket.put(key, value), bucket)

    async def retried(self, what: str, attempt: Callable[[], Awaitable[StoredT]], bucket: KeyValue) -> StoredT:
        """Try something with a bucket until the server answers; every attempt must bear that an earlier one was done.

        Raises:
            SetupError: the server no longer has the bucket.
        """
        return await self._stored(what, attempt, self.presence(f"the bucket for the {what}", bucket.status))

    async def _stored(self, what: str, attempt: Callable[[], Awaitable[StoredT]], presence: Presence) -> StoredT:
        """Try until the server has it; every attempt must be harmless when an earlier one was stored unheard."""
        while True:
            try:
                return await attempt()
            except BUS_ERRORS as error:
                if self._client.is_closed:
                    raise UnavailableError(f"the connection to NATS closed before {what} was stored") from None
                log.warning("bus.store_retried", what=what, error=repr(error))
                await presence.check()
                await asyncio.sleep(0.5)

    def max_payload_bytes(self, message_id: str) -> int:
        """The largest payload that `publish` takes: the server counts in headers and what JetStream stores beside."""
        return min(self._client.max_payload, _MAX_RECORD_BYTES) - len(message_id.encode()) - _OVERHEAD_BYTES

    async def purge(self, stream: Stream) -> int:
        """Remove every message of the stream, waiting out a server that is away, and return how many there were.

        Raises:
            SetupError: the server has the stream no more.
        """

        async def attempt() -> int:
            count = (await self._js.stream_info(stream.name)).state.messages
            await self._js.purge_stream(stream.name)
            return int(count)

        presence = self.presence(f"stream {stream.name}", lambda: self._js.stream_info(stream.name))
        return await self._stored(f"purge of {stream.name}", attempt, presence)

    async def delete_run(self) -> None:
        """Remove the run's streams; for tests and for starting over."""
        for stream in (self.prompts, self.groups, self.dead, self.calls, self.images):
            try:
                await self._js.delete_stream(stream.name)
            except nats.js.errors.NotFoundError:
                continue

    async def close(self) -> None:
        """Close the connection, also when the server is gone; what was not acked is delivered again to others."""
        await _close_quietly(self._client)


@asynccontextmanager
async def connect(config: BusConfig, *, run: str, security: Security | None = None) -> AsyncIterator[Bus]:
    """Connect to the server that `config` names, for the time of the context; reconnects by itself, for ever.

    Args:
        config: Where it is.
        run: Name of the run.
        security: Token and TLS; None: the tokens of the environment.

    Raises:
        AccessError: it refuses the token.
        SetupError: no server answers within the connect timeout, or it has no JetStream.
    """
    if not config.url:
        raise SetupError(
            "bus.url is empty; start a server with `penstock serve nats` and give --bus.url=nats://host:4222"
        )
    client, security = Client(), security or Security.from_environment()
    has_been_in = False
    last_error: Exception = TimeoutError()

    async def on_error(error: Exception) -> None:
        nonlocal last_error
        last_error = error
        log.debug("bus.failed", error=str(error) or type(error).__name__)
        if _REFUSED in str(error):
            if not has_been_in:
                raise AccessError(f"bus.url = {config.url!r}: {_REFUSAL}")  # ends the first connecting
            log.warning("bus.refused", url=config.url, reason=_REFUSAL)

    async def on_disconnect() -> None:
        if not client.is_closed:
            log.warning("bus.disconnected", url=config.url)

    try:
        async with asyncio.timeout(config.connect_timeout_s):
            await client.connect(
                config.url,
                name="penstock",
                max_reconnect_attempts=-1,
                reconnect_time_wait=1,
                connect_timeout=2,
                ping_interval=10,
                error_cb=on_error,
                disconnected_cb=on_disconnect,
                token=_token_for(client, security),
                tls=None if security.tls is None else security.tls.client_context(),
                tls_hostname=None if security.tls is None else security.tls.server_name or None,
            )
            has_been_in = True
            bus = Bus(client, config, run)
            await bus.jetstream.account_info()
    except (AccessError, asyncio.CancelledError):
        await _close_quietly(client)
        raise
    except (TimeoutError, OSError, nats.errors.Error, nats.js.errors.Error) as error:
        await _close_quietly(client)
        reason = "JetStream is not enabled" if isinstance(error, nats.js.errors.Error) else "no answer"
        if isinstance(last_error, ssl.SSLError | _PlainTextError):
            reason = f"no answer that TLS allows ({last_error})"
        raise SetupError(
            f"bus.url = {config.url!r}: {reason} within {config.connect_timeout_s:g} s; start one with "
            "`penstock serve nats` there, or give --bus.url=nats://host:port"
        ) from None
    try:
        yield bus
    finally:
        await bus.close()


def _token_for(client: Client, security: Security) -> Callable[[], str] | None:
    """What the client asks for when it is about to introduce itself: the last moment to see who would hear it."""
    if security.tls is None and not security.nats_token:
        return None

    def token() -> str:
        if security.tls is not None and not client._server_info.get("tls_required"):
            raise _PlainTextError(
                "the server speaks plain text, and [security] asks for TLS; switch it on at the server"
            )
        return security.nats_token

    return token


class _PlainTextError(nats.errors.Error):
    """nats-py would go on without TLS, and show the token to anybody."""


async def _close_quietly(client: Client) -> None:
    # Closing forgets the subscriptions, and fails before it has ended their tasks where the server is gone.
    tasks: list[asyncio.Task[None] | None] = [each._wait_for_msgs_task for each in client._subs.values()]
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await client.close()
    except (TimeoutError, OSError, nats.errors.Error):
        log.debug("bus.close_failed")
    tasks += [getattr(client, name) for name in _CLIENT_TASKS]
    for task in tasks:
        if task is not None and task is not asyncio.current_task():
            await end_task(task)
