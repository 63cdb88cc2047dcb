"""Agents whose engine is away, whose worker is killed, and whose connections are closed to strangers."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from penstock.agents import AgentSession
from penstock.bus.connection import Bus, connect
from penstock.bus.local_server import local_server
from penstock.clients import RouterClient
from penstock.config import BusConfig, SecurityConfig
from penstock.errors import DeadlineError, InvalidRequestError, PenstockError, PoisonError
from penstock.http.server import HttpServer
from penstock.model.chat.chat_template import Renderer
from penstock.runtime.security import Security
from penstock.testing.simulated_engine import SimulatedEngine
from services.recipe import Recipe
from services.rollout.worker.agents import agent_player
from services.rollout.worker.episodes.clock import EpisodeClock
from services.router.frontends.openai.sessions import session_api
from tests.support.certificates import security_of
from tests.support.processes import is_alive
from tests.support.strangers import TOKEN
from tests.support.waiting import HANG_S, promptly, until
from tests.support.worker import agent_runners
from tests.support.worker.agent_harness import LONG, PROGRAM, RUNNERS, TEXT, Speaker, agent_harness
from tests.support.worker.prompts import count, make_prompt, publish, until_done, working

ANSWER = "The answer is \\boxed{3}"


@contextlib.asynccontextmanager
async def answering(bus: Bus, renderer: Renderer, **settings: Any) -> AsyncIterator[SimulatedEngine]:
    """An engine that gives the right answer."""
    answer = Speaker(renderer, [("", ANSWER)])
    async with SimulatedEngine(bus, answer=answer, policy_version=4, **settings).running() as engine:
        yield engine


async def test_an_engine_that_comes_late_costs_no_sample(
    bus: Bus, renderer: Renderer, make_harness: Callable[..., Any], run_name: str
) -> None:
    """A call waits as long as its episode: the agent, which tries nothing twice, sees a slow answer, not an error."""
    recipe = await make_harness({"once": f"{RUNNERS}:ask_once"}, router={"wait_for_replica_s": 0.0})
    await publish(bus, make_prompt(run_name, environment="once", sampling=LONG, **TEXT))
    async with working(recipe), RouterClient(recipe.worker.router_address) as router:

        async def all_wait() -> bool:
            return (await router.list_replicas()).num_waiting == 2

        await until(all_wait)
        async with answering(bus, renderer):
            [group] = await until_done(bus, 1)
    assert (group.error, group.num_deliveries) == ("", 1)
    assert [(sample.finish_reason, sample.reward) for sample in group.samples] == [("stop", 1.0)] * 2


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("error", [PoisonError("3 replicas failed"), InvalidRequestError("an image cannot be read")])
async def test_a_first_call_that_can_never_succeed_is_made_once(
    bus: Bus,
    renderer: Renderer,
    make_harness: Callable[..., Any],
    run_name: str,
    monkeypatch: pytest.MonkeyPatch,
    error: PenstockError,
    is_streamed: bool,
) -> None:
    """Further attempts would break further engines; its group fails at once, with what the router found."""
    monkeypatch.setattr(agent_player, "_PAUSE_S", 0.0)
    recipe = await make_harness({"asks": f"{RUNNERS}:{'stream_once' if is_streamed else 'ask_once'}"})
    await publish(bus, make_prompt(run_name, environment="asks", num_samples=1, sampling=LONG, **TEXT))
    async with answering(bus, renderer, error=error) as engine, working(recipe, max_deliveries=2):
        [group] = await until_done(bus, 1)
    assert (engine.num_calls, group.num_deliveries) == (1, 1)
    assert group.error.startswith(f"{type(error).__name__}: agent 'asks' got no answer of the policy: ")
    assert str(error) in group.error


FORM: dict[str, Any] = {"response_format": {"type": "json_object"}}
"""A parameter that sessions refuse."""


async def test_a_call_that_was_refused_fails_no_group_whose_agent_goes_on(
    bus: Bus, renderer: Renderer, make_harness: Callable[..., Any], run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next call is allowed, and ends without an answer for another reason: the agent is called again."""
    monkeypatch.setattr(agent_player, "_PAUSE_S", 0.0)

    async def fall_back(session: AgentSession) -> float:
        with contextlib.suppress(openai.BadRequestError):
            await agent_runners.ask(session, **FORM)
        is_first = engine.num_calls == 0
        call = asyncio.create_task(agent_runners.ask(session))
        if is_first:
            await until(lambda: engine.num_calls)
            engine.delay_s = 0.0
            call.cancel()
        await asyncio.wait({call})
        return 1.0

    monkeypatch.setattr(agent_runners, "ask_nothing", fall_back)
    recipe = await make_harness({"tries": f"{RUNNERS}:ask_nothing"})
    await publish(bus, make_prompt(run_name, environment="tries", num_samples=1, sampling=LONG, **TEXT))
    async with answering(bus, renderer, delay_s=2 * HANG_S) as engine, working(recipe, max_deliveries=2):
        [group] = await until_done(bus, 1)
    assert (group.error, group.num_deliveries, engine.num_calls) == ("", 1, 2)
    assert [sample.reward for sample in group.samples] == [1.0]


@pytest.fixture
def time_is_over(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set it to end the time of the samples that are played."""
    over = asyncio.Event()

    class Clock(EpisodeClock):
        @contextlib.asynccontextmanager
        async def limit(self, what: str) -> AsyncIterator[None]:
            waiting = asyncio.create_task(over.wait())
            try:
                async with asyncio.timeout(None) as limit:
                    waiting.add_done_callback(lambda ended: None if ended.cancelled() else limit.reschedule(0.0))
                    yield
            except TimeoutError:
                raise DeadlineError(what) from None
            finally:
                waiting.cancel()

    monkeypatch.setattr(agent_player, "EpisodeClock", Clock)
    monkeypatch.setattr(agent_player, "_PAUSE_S", 0.01)
    monkeypatch.setattr(session_api, "_EARLY_LOOK_S", 0.01)
    return over


async def test_a_first_answer_that_takes_too_long_ends_its_sample_with_what_came(
    bus: Bus,
    renderer: Renderer,
    make_harness: Callable[..., Any],
    run_name: str,
    monkeypatch: pytest.MonkeyPatch,
    time_is_over: asyncio.Event,
) -> None:
    """Drawing the group again, or failing it, would select for short answers."""

    async def listen(session: AgentSession) -> float:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            async for chunk in await client.chat.completions.create(
                model=session.model, messages=session.messages, stream=True
            ):
                if chunk.choices[0].delta.content:
                    time_is_over.set()
        return 1.0

    monkeypatch.setattr(agent_runners, "ask_nothing", listen)
    recipe = await make_harness({"listens": f"{RUNNERS}:ask_nothing"})
    await publish(bus, make_prompt(run_name, environment="listens", num_samples=1, sampling=LONG, **TEXT))
    async with answering(bus, renderer, hang_after=5) as engine, working(recipe):
        [group] = await until_done(bus, 1)
    assert (group.error, group.num_deliveries, engine.num_calls) == ("", 1, 1)
    [sample] = group.samples
    assert 1 <= sample.num_own_tokens <= 5
    assert ANSWER.startswith(sample.text)
    assert (sample.finish_reason, sample.error) == ("deadline", "")
    assert "its runner was ended after 900 s, before it gave a reward" in sample.ended_by


async def test_a_sample_whose_time_ends_without_a_token_fails_its_group_with_the_reason(
    bus: Bus, make_harness: Callable[..., Any], run_name: str, time_is_over: asyncio.Event
) -> None:
    """Its call waits for an engine that does not come: the policy was asked."""
    recipe = await make_harness({"once": f"{RUNNERS}:ask_once"})
    await publish(bus, make_prompt(run_name, environment="once", num_samples=1, sampling=LONG, **TEXT))
    async with working(recipe), RouterClient(recipe.worker.router_address) as router:

        async def waits() -> bool:
            return (await router.list_replicas()).num_waiting == 1

        await until(waits)
        time_is_over.set()
        [group] = await until_done(bus, 1)
    assert group.num_deliveries == 2
    assert "agent 'once' got no token of the policy within 900 s; see whether its runner hangs or its" in group.error


async def test_a_sample_whose_time_ends_after_a_refused_call_was_not_failed_by_it(
    bus: Bus,
    make_harness: Callable[..., Any],
    run_name: str,
    monkeypatch: pytest.MonkeyPatch,
    time_is_over: asyncio.Event,
) -> None:
    """Its runner went on without that call."""
    monkeypatch.setattr(agent_player, "LAST_TOKENS_S", 0.0)

    async def hang(session: AgentSession) -> None:
        with contextlib.suppress(openai.BadRequestError):
            await agent_runners.ask(session, **FORM)
        time_is_over.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(agent_runners, "ask_nothing", hang)
    recipe = await make_harness({"hangs": f"{RUNNERS}:ask_nothing"})
    await publish(bus, make_prompt(run_name, environment="hangs", num_samples=1, sampling=LONG, **TEXT))
    async with working(recipe):
        [group] = await until_done(bus, 1)
    assert group.num_deliveries == 2
    assert "agent 'hangs' got no token of the policy within 900 s" in group.error


@contextlib.asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[str]:
    """A service of somebody else's; yields its URL."""
    server = HttpServer(app, host="127.0.0.1", port=0, security=Security())
    await server.start()
    try:
        yield server.url
    finally:
        await server.drain(0.0)


class Service:
    """A runner that is a service of its own: it outlives the worker that has called it."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.num_calls = 0
        self.goes_on = asyncio.Event()
        self.heard: asyncio.Future[openai.APIStatusError] = asyncio.get_running_loop().create_future()
        self.app.post("/")(self.play)
        self._kept: set[asyncio.Task[None]] = set()

    async def play(self, given: dict[str, Any]) -> dict[str, Any]:
        """The first time, ask and hang, and then ask again, though nobody waits for the result any more."""
        await self._ask(given)
        self.num_calls += 1
        if self.num_calls == 1:
            task = asyncio.create_task(self._go_on(given))
            self._kept.add(task)
            await asyncio.shield(task)  # the server ends requests whose caller is gone
        return {"reward": 0.5}

    async def _go_on(self, given: dict[str, Any]) -> None:
        await self.goes_on.wait()
        try:
            await self._ask(given)
        except openai.APIStatusError as error:
            self.heard.set_result(error)

    async def _ask(self, given: dict[str, Any]) -> None:
        async with openai.AsyncOpenAI(base_url=given["base_url"], api_key=given["api_key"]) as client:
            await client.chat.completions.create(model="any", messages=given["task"]["messages"])


@pytest.mark.slow
async def test_a_worker_killed_in_an_episode_of_an_agent_loses_nothing(
    bus: Bus, renderer: Renderer, make_harness: Callable[..., Any], run_name: str, tmp_path: Path
) -> None:
    """kill -9: its programs end with it, children included, a service hears that its session is superseded, and another
    worker plays the groups again, each once, of which nothing that was said before is trained."""
    pids, program, service = tmp_path / "pids", tmp_path / "program.py", Service()
    program.write_text(
        f"{PROGRAM}import os, time\nif not os.path.exists({str(pids)!r}):\n    os.fork()\n"
        f"    open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\n    time.sleep(3600)\n"
        "print(json.dumps({'reward': 0.25}))\n"
    )
    async with serving(service.app) as url, answering(bus, renderer) as engine:
        agents = {"program": {"command": [sys.executable, str(program)]}, "service": {"url": url}}
        recipe: Recipe = await make_harness(agents)
        config = tmp_path / "recipe.json"
        config.write_text(recipe.model_dump_json())
        for index, name in enumerate(agents):
            prompt = make_prompt(run_name, index, environment=name, num_samples=1, sampling=LONG, **TEXT)
            await publish(bus, prompt)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.support.worker.process", str(config)
        )
        await until(lambda: service.num_calls == 1 and pids.exists() and len(pids.read_text().split()) == 2, 120.0)
        os.kill(process.pid, signal.SIGKILL)
        await promptly(process.wait())
        await until(lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()))
        assert await count(bus, bus.groups) == 0
        async with working(recipe):
            groups = await until_done(bus, 2)
        assert engine.num_calls == 4
        service.goes_on.set()
        error = await promptly(service.heard)
        assert engine.num_calls == 4
    assert (error.status_code, error.code) == (409, "session_superseded")
    played = [(group.id.index, sample) for group in groups for sample in group.samples]
    ended = [(index, sample.reward, sample.finish_reason, len(sample.turns)) for index, sample in played]
    assert sorted(ended) == [(0, 0.25, "stop", 1), (1, 0.5, "stop", 1)]
    assert await count(bus, bus.dead) == 0


@pytest.mark.parametrize("mutual", [False, True])
async def test_an_agent_plays_over_tls_with_the_key_of_its_session(
    certificates: SecurityConfig,
    renderer: Renderer,
    make_recipe: Callable[..., Recipe],
    run_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mutual: bool,
) -> None:
    """A function has a TLS context, with a certificate where one is asked for, a program the authority's file; the key
    opens the agent's own session and no other, and strangers are refused."""
    secured = security_of(certificates.model_copy(update={"mutual": mutual}), token=TOKEN)
    seen = list[AgentSession]()

    async def call(session: AgentSession, key: str, url: str, headers: Mapping[str, str]) -> int:
        async with httpx.AsyncClient(verify=session.tls or True, timeout=HANG_S) as client:
            body = {"model": "any", "messages": session.messages}
            shown = {"Authorization": f"Bearer {key}", **headers}
            return (await client.post(url, headers=shown, json=body)).status_code

    async def play(session: AgentSession) -> float:
        seen.append(session)
        others = [each.api_key for each in seen if each is not session]
        by_url = f"{session.base_url}/chat/completions", dict[str, str]()
        by_header = f"{session.router_url}/v1/chat/completions", session.headers
        for url, headers in (by_url, by_header):
            assert await call(session, session.api_key, url, headers) == 200
            assert [await call(session, key, url, headers) for key in ("none", *others)] == [401] * (1 + len(others))
        for path in ("completions", "tokenize", "models"):
            assert await call(session, session.api_key, f"{session.router_url}/v1/{path}", session.headers) == 401
        return 1.0

    monkeypatch.setattr(agent_runners, "ask_nothing", play)
    program = tmp_path / "program.py"
    program.write_text(f"{PROGRAM}print(json.dumps({{'reward': 0.25}}))\n")
    agents: dict[str, Any] = {"function": f"{RUNNERS}:ask_nothing"}
    if not mutual:  # a program that has no certificate cannot play there
        agents["program"] = {"command": [sys.executable, str(program)]}
    async with (
        local_server(tmp_path / "nats", security=secured) as url,
        connect(bus_config := BusConfig(url=url), run=run_name, security=secured) as bus,
        answering(bus, renderer, security=secured),
        agent_harness(make_recipe, agents, security=secured, bus=bus_config) as recipe,
    ):
        async with working(recipe, security=secured):
            for index, name in enumerate(agents):
                await publish(bus, make_prompt(run_name, index, environment=name, sampling=LONG, **TEXT))
            groups = await until_done(bus, len(agents))
        async with httpx.AsyncClient(timeout=HANG_S) as stranger:
            with pytest.raises(httpx.ConnectError):
                await stranger.get(f"{seen[0].base_url}/models")
    rewards = {group.id.index: [(sample.reward, sample.error) for sample in group.samples] for group in groups}
    assert rewards == {index: [((1.0, 0.25)[index], "")] * 2 for index in range(len(agents))}
    assert len({session.api_key for session in seen}) == 2
