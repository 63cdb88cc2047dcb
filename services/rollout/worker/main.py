"""The worker process: takes prompt groups from the bus, plays them, publishes each finished group once.

Invariant: a prompt is acked only after its group is stored. A worker that is killed leaves its prompts unacked; another
plays them, and the group's message id keeps a second copy from being stored.
"""

import asyncio
import os
import socket
import uuid
from contextlib import AsyncExitStack
from typing import Protocol

import structlog

from penstock.bus.connection import connect
from penstock.bus.consumer import consuming
from penstock.bus.work_loop import work
from penstock.clients import GenerateClient, RewardClient
from penstock.config import BusConfig, ModelConfig, RunConfig, SamplingConfig
from penstock.errors import ConfigError
from penstock.model.chat_template import Renderer
from penstock.model.families.qwen_vl import ImageGrid
from penstock.model.tokens import context_length, forbidden_token_ids, image_token_id
from penstock.rpc.server import RpcServer
from penstock.runtime.hide_torch import torch_hidden
from services.rollout.worker.config import WorkerConfig
from services.rollout.worker.environments.registry import EnvironmentRegistry
from services.rollout.worker.episode import EpisodePlayer
from services.rollout.worker.group_rollout import GroupRollout
from services.rollout.worker.prompt_handler import PromptHandler

log = structlog.get_logger()

_CONSUMER = "workers"
_MAX_IN_HAND = 10_000
"""Unacked prompts over all workers. The trainer's gate is the real bound; this only has to exceed it."""


class Listens(Protocol):
    """A service of the same recipe, as far as its callers need to know it."""

    @property
    def port(self) -> int:
        """Port on this machine; 0 if it takes any free one."""


class HasContext(Protocol):
    """The engines' section, as far as the worker needs to know it."""

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence; 0 for the model's own limit."""


class WorkerRecipe(Protocol):
    """The part of a recipe that a worker reads."""

    @property
    def run(self) -> RunConfig:
        """The run's name."""

    @property
    def bus(self) -> BusConfig:
        """Where prompts come from and groups go."""

    @property
    def model(self) -> ModelConfig:
        """Whose tokenizer and chat template to use."""

    @property
    def sampling(self) -> SamplingConfig:
        """How tokens are drawn."""

    @property
    def worker(self) -> WorkerConfig:
        """Its own section."""

    @property
    def rollout(self) -> HasContext:
        """The engines that answer."""

    @property
    def router(self) -> Listens:
        """Where to find the router if `worker.router_address` is empty."""

    @property
    def reward(self) -> Listens:
        """Where to find the reward service if `worker.reward_address` is empty."""


async def serve(recipe: WorkerRecipe, stop: asyncio.Event) -> None:
    """Play prompt groups until `stop`, then put back those that do not finish within the grace period.

    Needs a process of its own: it keeps transformers from importing torch.

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
        verifier = await stack.enter_async_context(RewardClient(reward_address))
        episodes = EpisodePlayer(
            config,
            recipe.sampling,
            renderer=renderer,
            generator=generator,
            environments=environments,
            forbidden_ids=forbidden_token_ids(recipe.model.path),
            context_length=recipe.rollout.context_length or context_length(recipe.model.path),
            grid=None if image_token_id(recipe.model.path) is None else ImageGrid.of(recipe.model.path),
        )
        handler = PromptHandler(
            bus, GroupRollout(config, episodes=episodes, verifier=verifier, worker_id=worker_id), worker_id=worker_id
        )
        await bus.ensure_streams()
        consumer = await stack.enter_async_context(
            consuming(bus, bus.prompts, _CONSUMER, ack_wait_s=recipe.bus.ack_wait_s, max_ack_pending=_MAX_IN_HAND)
        )
        health = RpcServer(host=config.host, port=config.port)
        await health.start()
        stack.push_async_callback(health.drain, 0.0)
        log.info("worker.started", worker=worker_id, router=router_address, reward=reward_address)
        await work(
            consumer,
            handler.handle,
            stop=stop,
            concurrency=config.concurrency,
            max_deliveries=recipe.bus.max_deliveries,
            give_up=handler.give_up,
            grace_s=config.grace_s,
        )
        log.info("worker.stopped", worker=worker_id)


def _address(given: str, port: int, service: str) -> str:
    if not given and port == 0:
        raise ConfigError(
            f"worker.{service}_address is empty and {service}.port is 0; give --worker.{service}_address=host:port, "
            f"or --{service}.port=..."
        )
    return given or f"127.0.0.1:{port}"
