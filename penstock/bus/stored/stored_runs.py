"""What NATS stores of each run: lists it, and removes it when the run is deleted."""

import asyncio
import re
from collections import defaultdict
from dataclasses import dataclass

import nats.js.errors
from nats.js import api
from nats.js.kv import KV_OP

from penstock.bus.buckets.lock import TRAINER, claim
from penstock.bus.connection import BUCKETS, Bus
from penstock.bus.failures import BUS_ERRORS, describe
from penstock.errors import SetupError, UnavailableError

_STREAM = re.compile(
    rf"(?P<run>.+)_(PROMPTS|GROUPS|IMAGES|CALLS|SESSIONS|SPANS|DEAD)|KV_(?P<owner>.+)_({'|'.join(BUCKETS)})"
)
_PAGE = 256
"""Streams in one answer of JetStream."""
_OF_TTL = 0.7
"""Share of its run's `bus.lease_ttl_s` in which a living trainer renews its lock at least once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """One run on the servers."""

    name: str
    num_messages: int
    size_bytes: int
    is_running: bool
    """Whether a trainer renews its lock, or an engine its lease."""


async def list_stored_runs(bus: Bus) -> list[StoredRun]:
    """Return the runs that the servers of `bus` store, by name, whatever run `bus` itself is for.

    Takes most of the longest `bus.lease_ttl_s` among runs whose trainer has not released its lock.

    Raises:
        UnavailableError: the server does not answer.
    """
    try:
        found: dict[str, list[api.StreamInfo]] = defaultdict(list)
        page: list[api.StreamInfo] | None = None
        offset = 0
        while page is None or len(page) == _PAGE:
            page = await bus.jetstream.streams_info(offset)
            offset += len(page)
            for stream in page:
                if match := _STREAM.fullmatch(stream.config.name or ""):
                    found[match["run"] or match["owner"]].append(stream)
        running = await _running(bus, sorted(found))
    except BUS_ERRORS as error:
        raise UnavailableError(f"NATS at {bus.config.url} does not answer: {describe(error)}") from None
    return [
        StoredRun(
            name=name,
            num_messages=sum(stream.state.messages for stream in streams),
            size_bytes=sum(stream.state.bytes for stream in streams),
            is_running=name in running,
        )
        for name, streams in sorted(found.items())
        if any(_is_of_a_run(stream.config.name or "") for stream in streams)
    ]


def _is_of_a_run(stream: str) -> bool:
    """Return whether a stream shows that its run is Penstock's; other programs may have a stream ..._GROUPS, too."""
    return stream.startswith("KV_") or stream.endswith("_PROMPTS")


async def delete_stored_run(bus: Bus, run: str) -> None:
    """Remove all that NATS stores of `run`, after it has been made sure that nobody uses it.

    Raises:
        SetupError: a trainer or an engine of the run is alive.
        UnavailableError: the server does not answer; what is left can be removed again.
    """
    try:
        if engines := await _engines(bus, run):
            raise SetupError(
                f"run {run!r} has engines on NATS at {bus.config.url} ({', '.join(engines)}); stop them first"
            )
        locks = await _find_stream(bus, f"KV_{run}_locks")
        replicas = 1 if locks is None else locks.config.num_replicas or 1
        settings = {"replicas": replicas, "lease_ttl_s": await _lease_ttl_s(bus, run)}
        stored = Bus(bus.client, bus.config.model_copy(update=settings), run)
        if locks is not None:
            await _take_lock(stored, run)
        await stored.delete_run()
    except BUS_ERRORS as error:
        raise UnavailableError(f"NATS at {bus.config.url} does not answer: {describe(error)}; try again") from None


async def _take_lock(bus: Bus, run: str) -> None:
    """Take the trainer's lock, so that none starts meanwhile.

    Raises:
        SetupError: a trainer holds it.
    """
    try:
        await claim(bus, TRAINER, ttl_s=bus.config.lease_ttl_s)
    except SetupError as error:
        raise SetupError(f"run {run!r} is in use: {str(error).partition(';')[0]}; stop it first") from None


async def _running(bus: Bus, runs: list[str]) -> set[str]:
    """Return those of `runs` whose trainer or engines are alive."""
    running = {run for run in runs if await _engines(bus, run)}
    before = {run: held for run in runs if run not in running and (held := await _lock(bus, run)) is not None}
    if before:
        await asyncio.sleep(_OF_TTL * max([await _lease_ttl_s(bus, run) for run in before]))
        running |= {run for run, held in before.items() if await _lock(bus, run) not in (held, None)}
    return running


async def _lease_ttl_s(bus: Bus, run: str) -> float:
    """Return the run's own `bus.lease_ttl_s`, which its leases have; of a run without leases, that of `bus`."""
    leases = await _find_stream(bus, f"KV_{run}_replicas")
    return (leases.config.max_age if leases is not None else None) or bus.config.lease_ttl_s


async def _lock(bus: Bus, run: str) -> int | None:
    """Return the revision of the trainer's lock; None if nobody holds it."""
    try:
        found = await bus.jetstream.get_last_msg(f"KV_{run}_locks", f"$KV.{run}_locks.{TRAINER}")
    except nats.js.errors.NotFoundError:
        return None
    return found.seq if found.data else None


async def _engines(bus: Bus, run: str) -> list[str]:
    """Return the ids of engines whose lease has not lapsed."""
    bucket, subject = f"KV_{run}_replicas", f"$KV.{run}_replicas."
    stream = await _find_stream(bus, bucket, subjects=f"{subject}>")
    engines = []
    for key in sorted((stream.state.subjects or {}) if stream is not None else {}):
        try:
            found = await bus.jetstream.get_last_msg(bucket, key)
        except nats.js.errors.NotFoundError:
            continue  # it has lapsed
        if KV_OP not in (found.headers or {}):
            engines.append(key.removeprefix(subject))
    return engines


async def _find_stream(bus: Bus, name: str, *, subjects: str | None = None) -> api.StreamInfo | None:
    try:
        return await bus.jetstream.stream_info(name, subjects_filter=subjects)
    except nats.js.errors.NotFoundError:
        return None
