"""The worker process: takes prompt groups from the bus, plays them, publishes each finished group once.

Invariant: a prompt is acked only after its group is stored. A worker that is killed leaves its prompts unacked; another
plays them, and the group's message id keeps a second copy from being stored.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import structlog

from penstock.bus.connection import Bus, connect
from penstock.bus.consumer import Delivery, open_consumer, work
from penstock.clients import GenerateClient, RewardClient
from penstock.errors import ConfigError, CorruptMessageError
from penstock.model.chat_template import Renderer
from penstock.model.tokens import context_length, forbidden_token_ids
from penstock.records import Group, Prompt
from penstock.records.codec import decode, encode
from penstock.rpc.server import RpcServer
from penstock.runtime.hide_torch import torch_hidden
from services.rollout.worker.environments.registry import EnvironmentRegistry
from services.rollout.worker.episode import EpisodePlayer
from services.rollout.worker.group import GroupPlayer

if TYPE_CHECKING:
    from services.recipe import Recipe

log = structlog.get_logger()

_CONSUMER = "workers"
_MAX_IN_HAND = 10_000
"""Groups in the hands of all workers together. The trainer's gate is the bound; this only has to be above it."""


async def serve(recipe: Recipe, stop: asyncio.Event) -> None:
    """Play prompt groups until `stop`, then give back what does not finish within the grace period.

    Meant for a process of its own: transformers is kept from importing torch.

    Raises:
        ConfigError: an address is missing, an environment cannot be loaded, or the model has no tokenizer.
        SetupError: NATS is out of reach.
    """
    config = recipe.worker
    worker_id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:4]}"
    environments = EnvironmentRegistry(config.environments)
    router_address = _address(config.router_address, recipe.router.port, "router")
    reward_address = _address(config.reward_address, recipe.reward.port, "reward")
    with torch_hidden():
        renderer = await asyncio.to_thread(Renderer.load, recipe.model.path)
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connect(recipe.bus, run=recipe.run.name))
        generator = await stack.enter_async_context(GenerateClient(router_address))
        judge = await stack.enter_async_context(RewardClient(reward_address))
        episodes = EpisodePlayer(
            config,
            recipe.sampling,
            renderer=renderer,
            generator=generator,
            environments=environments,
            forbidden_ids=forbidden_token_ids(recipe.model.path),
            context_length=recipe.rollout.context_length or context_length(recipe.model.path),
        )
        desk = Desk(bus, GroupPlayer(config, episodes=episodes, judge=judge, worker_id=worker_id), worker_id=worker_id)
        await bus.ensure_streams()
        ack_wait_s = recipe.bus.ack_wait_s
        consumer = await open_consumer(bus, bus.prompts, _CONSUMER, ack_wait_s=ack_wait_s, max_ack_pending=_MAX_IN_HAND)
        health = RpcServer(host=config.host, port=config.port)
        await health.start()
        stack.push_async_callback(health.drain, 0.0)
        log.info("worker.started", worker=worker_id, router=router_address, reward=reward_address)
        await work(
            consumer,
            desk.handle,
            stop=stop,
            concurrency=config.concurrency,
            heartbeat_s=ack_wait_s / 3,
            max_deliveries=recipe.bus.max_deliveries,
            give_up=desk.give_up,
            grace_s=config.grace_s,
        )
        log.info("worker.stopped", worker=worker_id)


class Desk:
    """Where a prompt comes in and its group goes out."""

    def __init__(self, bus: Bus, player: GroupPlayer, *, worker_id: str) -> None:
        """Play with `player` and publish on `bus`."""
        self._bus = bus
        self._player = player
        self._worker_id = worker_id

    async def handle(self, delivery: Delivery) -> None:
        """Play the delivered prompt and store its group."""
        prompt = decode(delivery.payload, Prompt)
        await self._publish(await self._player.play(prompt))

    async def give_up(self, delivery: Delivery, reason: str) -> None:
        """Tell the trainer that there will be no samples, and why."""
        try:
            prompt = decode(delivery.payload, Prompt)
        except CorruptMessageError:
            # No prompt, so no group to tell of; but the id tells the trainer which one will not come.
            await self._bus.publish(self._bus.groups, delivery.payload, message_id=delivery.message_id)
            return
        await self._publish(Group(prompt=prompt, samples=(), worker_id=self._worker_id, error=reason))

    async def _publish(self, group: Group) -> None:
        message_id = group.prompt.message_id
        is_new = await self._bus.publish(self._bus.groups, encode(group), message_id=message_id)
        log.info("group.published", group=message_id, is_new=is_new, error=group.error or None)


def _address(given: str, port: int, service: str) -> str:
    if not given and port == 0:
        raise ConfigError(
            f"worker.{service}_address is empty and {service}.port is 0; give --worker.{service}_address=host:port, "
            f"or --{service}.port=..."
        )
    return given or f"127.0.0.1:{port}"
