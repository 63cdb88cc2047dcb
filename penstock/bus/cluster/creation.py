"""Creates streams, buckets and consumers, and says what is wrong if a server or a cluster does not."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import nats.js.errors
import structlog

from penstock.bus.answers import RETRY_S, until_answered
from penstock.bus.failures import BUS_ERRORS, describe
from penstock.bus.greeting import greeting_of
from penstock.config import BusConfig
from penstock.config.nats_url import address_of
from penstock.errors import SetupError

log = structlog.get_logger()

CreatedT = TypeVar("CreatedT")

_SETTLING_S = 10.0
"""Seconds that the servers of a cluster may take to find each other, and a server to write what it had begun."""
_NO_PEERS, _NO_CLUSTER = 10005, 10074
"""JetStream's codes: no suitable peers for placement; replicas > 1 not supported in non-clustered mode."""
_CONSUMER_NOT_WRITTEN = 10012
"""JetStream's code for a consumer whose files cannot be written. A server that is busy may still write the state of a
removed consumer while one of the same name is made, and moves the file of the new one away (nats-server 2.15,
`consumerFileStore.writeState` and `delete`)."""
_NO_STORAGE = "insufficient storage"


async def create(
    config: BusConfig,
    what: str,
    ask: Callable[[], Awaitable[CreatedT]],
    *,
    passing: type[Exception] | tuple[()] = (),
) -> CreatedT:
    """Return what `ask` creates. It is repeated while nobody answers, and must be repeatable.

    Args:
        config: The servers.
        what: What is created, for error messages: "stream run_PROMPTS".
        ask: Creates it, or finds it as it should be.
        passing: Errors to raise unchanged.

    Raises:
        SetupError: the servers do not create it.
    """
    settled_at: float | None = None
    while True:
        try:
            return await until_answered(config, what, ask)
        except BUS_ERRORS as error:
            code = getattr(error, "err_code", None)
            settled_at = settled_at or time.monotonic() + _SETTLING_S
            if code == _CONSUMER_NOT_WRITTEN and time.monotonic() < settled_at:
                log.warning("bus.not_set_up", what=what, error=describe(error))
                await asyncio.sleep(RETRY_S)
                continue
            if code in (_NO_PEERS, _NO_CLUSTER):
                without = await servers_without_jetstream(config)
                if code == _NO_PEERS and not without and time.monotonic() < settled_at:
                    await asyncio.sleep(RETRY_S)
                    continue
                raise SetupError(_describe_few_servers(config, what, describe(error), without)) from None
            if passing and isinstance(error, passing):
                raise
            raise SetupError(
                f"NATS at {config.url}: {what} could not be set up ({describe(error)}); see that the server runs, "
                "that its JetStream is enabled and that it has room to store"
            ) from None


def _describe_few_servers(config: BusConfig, what: str, reason: str, without: list[str]) -> str:
    start = f"NATS at {config.url}: {what} cannot have bus.replicas = {config.replicas} ({reason})"
    if _NO_STORAGE in reason:
        return f"{start}; make room on the disks of the servers"
    if without:
        return (
            f"{start}: {', '.join(without)} runs without JetStream; add a jetstream block to its configuration and "
            "start it again"
        )
    return (
        f"{start}; start {config.replicas} nats-servers with JetStream that form one cluster, or set bus.replicas to "
        "how many there are (1, 3 or 5)"
    )


async def servers_without_jetstream(config: BusConfig) -> list[str]:
    """Return the URLs of `config` whose server says in its greeting that it has no JetStream."""
    answers = await asyncio.gather(*(greeting_of(*address_of(server)) for server in config.servers))
    return [
        server
        for server, greeting in zip(config.servers, answers, strict=True)
        if greeting is not None and not greeting.get("jetstream")
    ]


def describe_other_settings(what: str, error: nats.js.errors.BadRequestError, *, found: int | None, wanted: int) -> str:
    """Return the start of an error text: `what` exists with other settings, above all with other replicas.

    Args:
        what: "stream run_PROMPTS".
        error: The server's refusal.
        found: Replicas of the existing one; None if they are unknown.
        wanted: bus.replicas.
    """
    if found is None or found == wanted:
        return f"{what} exists with other settings ({error.description})"
    return f"{what} exists with {found} {'replica' if found == 1 else 'replicas'}, and bus.replicas = {wanted}"
