"""Each service asks for the token, and shows it to the others: real servers, and callers without it."""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest
from fastapi import Request

from penstock.bus.connection import Bus
from penstock.clients import GenerateClient, RewardClient, RouterClient, TrainerClient
from penstock.clients.routed import RoutedGenerateClient
from penstock.config import SecurityConfig
from penstock.errors import AccessError, UnavailableError
from penstock.http.app import make_app
from penstock.http.server import HttpServer
from penstock.rpc.server import RpcServer
from penstock.runtime.security import Security
from penstock.testing.simulated_engine import SimulatedEngine
from penstock.v1 import generate_pb2, reward_pb2, trainer_pb2_grpc
from penstock.verdict_status import Status
from services.reward.config import MAX_DEADLINE_S, RemoteConfig, RewardConfig
from services.reward.item import Item
from services.reward.remote import RemoteVerifier
from services.reward.server import running
from services.router.config import RouterConfig
from services.router.server import routing
from services.router.tuning import Tuning
from services.trainer.telemetry.progress import Progress, TrainerServicer
from tests.support.certificates import security_of
from tests.support.reward.service import EASY, item_of
from tests.support.strangers import TOKEN, WRONG, assert_http_is_closed, assert_rpc_is_closed
from tests.support.waiting import HANG_S, until

GENERATE = "/penstock.v1.GenerateService/Generate"


@pytest.fixture
def secured(certificates: SecurityConfig) -> Security:
    """A token and TLS."""
    return security_of(certificates, token=TOKEN)


def stranger_of(certificates: SecurityConfig, token: str = "") -> Security:
    return security_of(certificates, token=token)


def turn(**fields: object) -> generate_pb2.GenerateRequest:
    sampling = generate_pb2.SamplingParams(max_new_tokens=4)
    return generate_pb2.GenerateRequest(request_id="r", input_ids=[5, 6], sampling=sampling, **fields)


async def test_reward(certificates: SecurityConfig, secured: Security) -> None:
    """Both frontends, with a judge in a worker process."""
    async with running(RewardConfig(workers=1, deadline_s=MAX_DEADLINE_S), security=secured) as service:
        for token in ("", WRONG):
            stranger = stranger_of(certificates, token)
            await assert_rpc_is_closed(service.rpc.address, "/penstock.v1.RewardService/Verify", security=stranger)
        async with RewardClient(service.rpc.address, security=secured) as client:
            assert (await client.verify(item_of(*EASY), timeout_s=20.0)).score == 1.0
        tls = stranger_of(certificates).tls
        assert tls is not None
        async with httpx.AsyncClient(base_url=service.http.url, verify=tls.client_context(), timeout=HANG_S) as http:
            await assert_http_is_closed(http, "/v1/verify")
            assert (await http.get("/healthz")).json() == {"status": "serving"}
            assert (await http.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})).status_code == 200


async def test_processes_that_judge_have_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold what strangers wrote; the service that starts them has the token in its environment."""
    monkeypatch.setenv("PENSTOCK_TOKEN", TOKEN)
    before = set(psutil.Process().children())
    config = RewardConfig(workers=1, deadline_s=MAX_DEADLINE_S)
    async with running(config) as service, RewardClient(service.rpc.address) as client:
        await client.verify(item_of(*EASY), timeout_s=20.0)
        [forkserver] = set(psutil.Process().children()) - before  # workers are forks of it
        assert "PATH" in forkserver.environ()
        assert TOKEN not in str(forkserver.environ())


_CURIOUS = """
def verify(golds, response, prompt):
    try:
        with open(f"/proc/{response}/environ") as file:
            return {"credit": golds[0] in file.read(), "extracted": "read"}
    except OSError as error:
        return {"credit": 0, "extracted": type(error).__name__}
"""
UNPRIVILEGED = [] if os.geteuid() else ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
"""Begins the command of a process to which the kernel refuses what it refuses to others; root's own goes through."""


async def test_processes_that_judge_cannot_read_the_secret_of_their_server(tmp_path: Path) -> None:
    """Nor has /proc what it was started with, where the service and its workers are the same user's."""
    (tmp_path / "curious.py").write_text(_CURIOUS)
    verifier = f"--reward.verifiers.curious={tmp_path}/curious.py:verify"
    settings = (verifier, "--reward.workers=1", "--reward.deadline_s=30", "--log.format=json")
    environment = os.environ | {"PENSTOCK_TOKEN": TOKEN}
    server = await asyncio.create_subprocess_exec(
        *(*UNPRIVILEGED, sys.executable, "-m", "services.cli", "serve", "reward", *settings),
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    neighbour = await asyncio.create_subprocess_exec(*UNPRIVILEGED, "sleep", "60", env=environment)
    assert server.stderr is not None
    try:
        async with asyncio.timeout(HANG_S):
            while b"server.started" not in (line := await server.stderr.readline()):
                assert line, "the service did not start"
            items = [
                reward_pb2.VerifyItem(golds=[TOKEN], response=str(pid), profile="curious")
                for pid in (neighbour.pid, server.pid)
            ]
            address = json.loads(line)["address"]
            async with RewardClient(address, security=Security(token=TOKEN)) as client:
                verdicts = await client.verify_batch(items, timeout_s=HANG_S)
    finally:
        neighbour.kill()
        await neighbour.wait()
        server.terminate()
        await server.communicate()
    seen = [(verdict.score, verdict.extracted) for verdict in verdicts]
    assert seen == [(1.0, "read"), (0.0, "PermissionError")]  # the neighbour has hidden nothing


async def test_what_the_remote_judge_logs_has_no_secret_of_its_url(capsys: pytest.CaptureFixture[str]) -> None:
    """A key in the query is one; what the service answered is told without it."""
    app = make_app(title="remote", description="", version="0")

    @app.post("/")
    async def judge() -> float:
        raise UnavailableError("out of order")

    server = HttpServer(app, host="127.0.0.1", port=0, security=Security())
    await server.start()
    remote = RemoteVerifier(RemoteConfig(url=f"{server.url}/?key={TOKEN}"), max_tries=1)
    judgement, _ = await remote.verify(Item(golds=["5"], response="r", profile="remote"), 30.0)
    await remote.close()
    await server.drain(0.0)
    assert judgement.status is Status.FAILED
    logged = capsys.readouterr().out
    assert "it answered with HTTP status 503" in logged
    assert TOKEN not in logged


async def test_the_remote_judge_is_shown_its_own_token_and_no_other(
    monkeypatch: pytest.MonkeyPatch, certificates: SecurityConfig, secured: Security
) -> None:
    """It may be anybody's; this one asks for a token and speaks TLS."""
    shown = []
    app = make_app(title="remote", description="", version="0")

    @app.post("/")
    async def judge(request: Request) -> float:
        shown.append(request.headers["authorization"])
        return 0.5

    server = HttpServer(app, host="127.0.0.1", port=0, security=security_of(certificates, token="remotes"))
    await server.start()
    item = Item(golds=["5"], response="r", profile="remote")
    statuses = []
    for token in ("", "remotes"):
        monkeypatch.setenv("PENSTOCK_REMOTE_TOKEN", token)
        remote = RemoteVerifier(RemoteConfig(url=server.url), secured.tls)
        judgement, _ = await remote.verify(item, 30.0)
        statuses.append(judgement.status)
        await remote.close()
    await server.drain(0.0)
    assert statuses == [Status.FAILED, Status.OK]
    assert shown == ["Bearer remotes"]


@contextlib.asynccontextmanager
async def pool(bus: Bus, security: Security) -> AsyncIterator[tuple[RpcServer, SimulatedEngine]]:
    """A router and one engine that it knows."""
    async with (
        SimulatedEngine(bus, replica_id="one", security=security).running() as engine,
        routing(RouterConfig(), bus, security=security) as router,
    ):
        yield router, engine


async def test_router_and_engine(steady_bus: Bus, secured: Security, certificates: SecurityConfig) -> None:
    """Both refuse strangers; a call goes through the router to the engine, and one that was routed goes there alone."""
    async with pool(steady_bus, secured) as (router, engine):
        for address, method in (
            (router.address, GENERATE),
            (router.address, "/penstock.v1.RouterService/ListReplicas"),
            (engine.replica.address, GENERATE),
            (engine.replica.address, "/penstock.v1.RolloutService/DrainReplica"),
        ):
            await assert_rpc_is_closed(address, method, security=stranger_of(certificates, WRONG))
        async with (
            GenerateClient(router.address, security=secured) as proxied,
            RoutedGenerateClient(router.address, security=secured) as routed,
        ):
            for client in (proxied, routed):
                assert len((await client.generate(turn(), timeout_s=10.0)).output_ids) == 4
                chunks = [chunk async for chunk in client.stream(turn(), timeout_s=10.0)]
                assert sum(len(chunk.output_ids) for chunk in chunks) == 4
        async with RouterClient(router.address, security=secured) as client:
            await client.drain_replica("one", grace_s=1.0, timeout_s=10.0)  # the router calls the engine
        async with GenerateClient(router.address, security=stranger_of(certificates)) as stranger:
            with pytest.raises(AccessError, match="set PENSTOCK_TOKEN"):  # at once: no repetition mends it
                await stranger.generate(turn(), timeout_s=10.0, retry_until=time.monotonic() + 3600)


async def test_an_engine_with_another_token_is_a_sick_replica(steady_bus: Bus) -> None:
    """Its refusal is not the caller's: a call goes to another engine, or where there is none, says which refused."""
    right, wrong = Security(token=TOKEN), Security(token=WRONG)
    async with SimulatedEngine(steady_bus, replica_id="odd", security=wrong).running() as odd:
        async with (
            routing(RouterConfig(), steady_bus, security=right, tuning=Tuning(time_to_answer_s=HANG_S)) as router,
            GenerateClient(router.address, security=right) as client,
        ):
            with pytest.raises(UnavailableError, match=r"replica odd at .*token missing or wrong"):
                await client.generate(turn(), timeout_s=HANG_S + 1.0)
            async with (
                SimulatedEngine(steady_bus, replica_id="one", security=right).running(),
                RouterClient(router.address, security=right) as asking,
            ):

                async def are_known() -> bool:
                    return len((await asking.list_replicas()).replicas) == 2

                await until(are_known)
                for number in range(8):
                    answer = await client.generate(turn(session_id=str(number)), timeout_s=2 * HANG_S)
                    assert answer.replica_id == "one"
        assert odd.requests == []


async def test_trainer(certificates: SecurityConfig, secured: Security) -> None:
    """Where a run stands is told to those who have the token."""
    server = RpcServer(host="127.0.0.1", port=0, security=secured)
    servicer = TrainerServicer(Progress(run_id="r", num_steps=5))
    register = trainer_pb2_grpc.add_TrainerServiceServicer_to_server
    server.add(register, servicer, "penstock.v1.TrainerService")
    await server.start()
    await assert_rpc_is_closed(
        server.address, "/penstock.v1.TrainerService/GetRun", security=stranger_of(certificates, WRONG)
    )
    async with TrainerClient(server.address, security=secured) as client:
        assert (await client.get_run()).num_steps == 5
    await server.drain(0.0)
