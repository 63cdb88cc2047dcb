"""The worker process: takes prompt groups from the bus, plays them, publishes each finished group once.

Invariant: a prompt is acked only after its group is stored. A killed worker leaves its prompts unacked; another plays
them, and the group's message id prevents a second copy.
"""

import asyncio
import os
import socket
import uuid
from contextlib import AsyncExitStack

import structlog

from penstock.bus.connection import connect
from penstock.bus.image_store import ImageStore
from penstock.bus.sessions import Sessions
from penstock.bus.work_queue.consumer import consuming
from penstock.bus.work_queue.work_loop import work
from penstock.clients import GenerateClient, RewardClient
from penstock.model.chat.chat_template import Renderer
from penstock.model.families.qwen_vl import ImageGrid
from penstock.model.tokens import context_length, forbidden_token_ids, image_token_id
from penstock.rpc.server import RpcServer
from penstock.runtime.children.reaper import Reaper
from penstock.runtime.garbage import rare_collections
from penstock.runtime.imports import torch_hidden
from penstock.runtime.security import Security
from penstock.telemetry.serving import serving_metrics
from services.rollout.worker import metrics
from services.rollout.worker.agents.agent_player import AgentPlayer
from services.rollout.worker.agents.runners import load_runner
from services.rollout.worker.answer_verifier import AnswerVerifier
from services.rollout.worker.config import WorkerSettings
from services.rollout.worker.environments.registry import EnvironmentRegistry
from services.rollout.worker.episodes.episode_player import EpisodePlayer
from services.rollout.worker.episodes.turn import WAIT_TIMEOUT_S
from services.rollout.worker.group_rollout import GroupRollout
from services.rollout.worker.loop_watchdog import LIMIT_S, LoopWatchdog
from services.rollout.worker.players import Players
from services.rollout.worker.prompt_handler import PromptHandler

log = structlog.get_logger()

_CONSUMER = "workers"
MAX_DELIVERIES = 20
"""With the pauses between them they span almost three minutes, in which a router or a reward service comes back. A
group that still fails then fails for good."""
_MAX_IN_HAND = 100_000
"""Unacked prompts over all workers. The trainer's gate is the real bound; this only has to exceed it: 2,048 engines
that run 64 samples each play 16,384 groups of eight."""


async def serve(
    settings: WorkerSettings,
    stop: asyncio.Event,
    *,
    security: Security,
    max_deliveries: int = MAX_DELIVERIES,
    wait_timeout_s: float = WAIT_TIMEOUT_S,
    loop_limit_s: float = LIMIT_S,
) -> None:
    """Play prompt groups until `stop`, then put back those that do not finish within the grace period.

    Needs its own process, because it keeps transformers from importing torch. A group that has failed `max_deliveries`
    times is given up and reported to the trainer as failed. A turn may wait `wait_timeout_s` for a replica, and a group
    for its verdicts. A loop that is blocked for `loop_limit_s` is logged with what blocks it.

    Raises:
        ConfigError: an environment or agent cannot be loaded, or the model has no tokenizer.
        SetupError: NATS is out of reach, or has lost the run's data.
    """
    config = settings.worker
    worker_id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:4]}"
    environments = EnvironmentRegistry(
        config.environments, security=security, max_processes=config.environment_processes
    )
    with torch_hidden():
        renderer = await asyncio.to_thread(Renderer.load, settings.model.path)
    async with AsyncExitStack() as stack:
        runners = {}
        if config.agents:
            reaper = await Reaper.start()
            stack.push_async_callback(reaper.end)
            runners = {name: load_runner(name, agent, reaper) for name, agent in config.agents.items()}
        await stack.enter_async_context(environments)
        bus = await stack.enter_async_context(connect(settings.bus, run=settings.run.name, security=security))
        generator = await stack.enter_async_context(GenerateClient(settings.router_address, security=security))
        verifier = await stack.enter_async_context(RewardClient(settings.reward_address, security=security))
        answer_verifier = AnswerVerifier(verifier, wait_timeout_s=wait_timeout_s)
        episodes = EpisodePlayer(
            config,
            renderer=renderer,
            generator=generator,
            environments=environments,
            answer_verifier=answer_verifier,
            forbidden_ids=forbidden_token_ids(settings.model.path),
            context_length=settings.context_length or context_length(settings.model.path),
            grid=None if image_token_id(settings.model.path) is None else ImageGrid.of(settings.model.path),
            wait_timeout_s=wait_timeout_s,
            router_replay=settings.router_replay,
        )
        await bus.ensure_streams()
        images = ImageStore(bus)
        await images.ensure()
        sessions = Sessions(bus)
        if runners:
            await sessions.ensure()
        agents = AgentPlayer(
            runners,
            answer_verifier=answer_verifier,
            sessions=sessions,
            renderer=renderer,
            router_url=settings.router_url,
            security=security,
            episode_timeout_s=config.episode_timeout_s,
        )
        rollout = GroupRollout(
            episodes=Players(episodes, agents), images=images, answer_verifier=answer_verifier, worker_id=worker_id
        )
        handler = PromptHandler(bus, rollout, worker_id=worker_id)
        consumer = await stack.enter_async_context(
            consuming(bus, bus.prompts, _CONSUMER, ack_wait_s=settings.bus.ack_wait_s, max_ack_pending=_MAX_IN_HAND)
        )
        health = RpcServer(host=settings.network.host, port=config.port, key="worker.port", security=security)
        await health.start()
        stack.push_async_callback(health.drain, 0.0)
        metrics.SLOTS.set(config.concurrency)
        await stack.enter_async_context(serving_metrics(settings.metrics, settings.run, settings.network, security))
        stack.enter_context(LoopWatchdog(environments.in_loop, limit_s=loop_limit_s))
        stack.enter_context(rare_collections())
        log.info("worker.started", worker=worker_id, router=settings.router_address, reward=settings.reward_address)
        await work(
            consumer,
            handler.handle,
            stop=stop,
            concurrency=config.concurrency,
            max_deliveries=max_deliveries,
            give_up=handler.give_up,
            grace_s=settings.run.grace_s,
        )
        log.info("worker.stopped", worker=worker_id)
