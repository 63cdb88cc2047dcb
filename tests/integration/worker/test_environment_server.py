"""`penstock serve environments`: a real process, and workers that play at it."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.bus.connection import Bus
from penstock.bus.span_stream import SpanReader
from penstock.errors import EnvironmentFailedError, OverloadedError
from penstock.model.chat.chat_template import Renderer
from penstock.records import Limits
from penstock.runtime.ports import free_ports
from penstock.testing.simulated_engine import SimulatedEngine
from services.recipe import Recipe
from services.rollout.worker.config import WorkerConfig
from services.rollout.worker.environments.registry import EnvironmentRegistry
from tests.support.strangers import TOKEN
from tests.support.waiting import HANG_S, until
from tests.support.worker import scripted_episodes
from tests.support.worker.environment_server import environment_server
from tests.support.worker.hosted_episodes import HERE, make_task, play_on, text_of, turn
from tests.support.worker.prompts import count, make_prompt, publish, until_done, working
from tests.support.worker.scripted_episodes import END, ScriptedPolicy, make_player, play

TOKEN_OF_RUN = "5f0c6f7a3f0b4f6d9d0e0a1b2c3d4e5f"
ECHO = f"--worker.environments.Echo={HERE}:Echo"


def with_args(args: str) -> str:
    """The same with arguments, as TOML."""
    return f'--worker.environments.Echo={{class = "{HERE}:Echo", args = {args}}}'


async def test_a_worker_plays_an_episode_at_the_server(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table names its url; token and arguments are the server's own."""
    monkeypatch.setenv("PENSTOCK_ENVIRONMENT_TOKEN", TOKEN)
    renderer = Renderer.load(tiny_model_path)
    with environment_server(with_args('{greeting = "Good day"}')) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=HANG_S) as http:
            assert (await http.get("/healthz")).json() == {"status": "serving"}
            assert (await http.delete("/v1/episodes/x")).status_code == 401
        tables = WorkerConfig(environments={"mine": {"url": server.url, "name": "Echo"}}).environments
        async with EnvironmentRegistry(tables) as registry:
            policy = ScriptedPolicy(renderer, [("one" + END, 4), ("stop" + END, 5)])
            player = make_player(renderer, policy, environments=registry)
            episode = await play(player, scripted_episodes.make_prompt("mine"))
    assert (episode.finish_reason, episode.reward, len(episode.trajectory.turns)) == ("stop", 2.0, 2)
    assert "Good day" in renderer.decode(episode.trajectory.token_ids)


async def test_an_environment_may_stop_waiting_for_a_verdict(tmp_path: Path) -> None:
    """It plays on, as in the event loop, and a later question gets its own verdict."""
    table = f'{{class = "{HERE}:GivesUp", args = {{folder = "{tmp_path}"}}}}'
    with environment_server(f"--worker.environments.GivesUp={table}") as server:
        tables = WorkerConfig(environments={"GivesUp": {"url": server.url}}).environments
        async with EnvironmentRegistry(tables) as registry:
            environment = registry.find("GivesUp")()
            assert await play_on(environment, tmp_path) == ["played on", "3 1.0", "played on"]
            await environment.close()


async def play_until_it_fails(url: str) -> None:
    """An episode of three calls, of which the last one fails."""
    async with EnvironmentRegistry(WorkerConfig(environments={"Echo": {"url": url}}).environments) as registry:
        environment = registry.find("Echo")()
        await environment.reset(make_task())
        await environment.step(turn("grade 3"))
        with pytest.raises(EnvironmentFailedError):
            await environment.step(turn("grade fail"))
        await environment.close()


async def test_a_server_records_each_call_of_an_environment(bus: Bus, nats_url: str, run_name: str) -> None:
    """In the trace of the run that its recipe names: sample, turn, the time with its verdicts, and how it failed."""
    of_run = (f"--bus.url={nats_url}", f"--run.name={run_name}", "--name=env-0")
    reader = SpanReader(bus)
    with environment_server(ECHO, *of_run) as server:
        await play_until_it_fails(server.url)
        found: list[Any] = []

        async def are_there() -> bool:
            for each in await reader.read():
                batch = json.loads(each.payload)
                found.extend((batch["process"], *span) for span in batch["spans"])
            return len(found) >= 3

        await until(are_there)
    await reader.close()
    assert {(process, name) for process, name, *_ in found} == {("env-0", "environment.call")}
    assert {(about["group"], about["sample"], about["environment"]) for *_, about in found} == {
        ("run/0/0/a", 0, "Echo")
    }
    assert [about.get("turn") for *_, about in found] == [None, 0, 1]
    assert [bool(about.get("error")) for *_, about in found] == [False, False, True]


async def test_a_server_shows_prometheus_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the token of the run, under its name in the run's folder: calls by route and by how they ended, and room."""
    monkeypatch.setenv("PENSTOCK_ENVIRONMENT_TOKEN", TOKEN)
    monkeypatch.setenv("PENSTOCK_TOKEN", TOKEN_OF_RUN)
    folder = tmp_path / "mine-1"
    folder.mkdir()
    settings = ("--metrics.port=0", f"--run.folder={folder}", "--name=env-0", "--environment_server.max_episodes=7")
    with environment_server(ECHO, *settings) as server:
        await play_until_it_fails(server.url)
        [target] = json.loads((tmp_path / "prometheus" / "mine-1.env-0.json").read_text())
        [address] = target["targets"]
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=HANG_S) as http:
            assert (await http.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})).status_code == 401
            page = (await http.get("/metrics", headers={"Authorization": f"Bearer {TOKEN_OF_RUN}"})).text
    assert target["labels"] == {"service": "environments", "instance": "env-0", "run": "mine-1", "__scheme__": "http"}
    shown = {name: float(value) for name, value in re.findall(r"^([^# ]\S*) (\S+)$", page, re.MULTILINE)}
    route = 'route="/v1/episodes/{episode_id}"'
    assert shown[f'penstock_http_requests_total{{{route},status="200"}}'] >= 3
    assert shown[f"penstock_http_request_seconds_count{{{route}}}"] >= 3
    assert shown['penstock_environment_calls_total{outcome="answered"}'] == 2
    assert shown['penstock_environment_calls_total{outcome="failed"}'] == 1
    assert shown["penstock_environment_call_seconds_count"] == 3
    assert (shown["penstock_environment_episodes"], shown["penstock_environment_max_episodes"]) == (0, 7)
    assert 'penstock_process_info{name="env-0",run="run",service="environments"' in page


async def test_an_environment_that_leaves_its_program_ends_its_own_sample() -> None:
    """The server goes on; exit code 2 would end the run."""
    with environment_server(f"--worker.environments.Leaves={HERE}:Leaves") as server:
        tables = WorkerConfig(environments={"Leaves": {"url": server.url}}).environments
        async with EnvironmentRegistry(tables) as registry:
            for _ in range(2):
                environment = registry.find("Leaves")()
                with pytest.raises(EnvironmentFailedError, match=r"reset raised RuntimeError: SystemExit\(2\)"):
                    await environment.reset(make_task())
                await environment.close()


async def test_a_server_that_is_stopped_lets_its_episodes_end() -> None:
    """It takes no new one and says so on its health page; a step in play still gets its verdict; then it ends."""
    with environment_server(ECHO, "--run.grace_s=600") as server:
        tables = WorkerConfig(environments={"Echo": {"url": server.url}}).environments
        async with EnvironmentRegistry(tables) as registry, httpx.AsyncClient(timeout=HANG_S) as http:
            environment, late = registry.find("Echo")(), registry.find("Echo")()
            await environment.reset(make_task())
            server.process.terminate()

            async def is_stopping() -> bool:
                return (await http.get(f"{server.url}/healthz")).status_code == 503

            await until(is_stopping)
            with pytest.raises(OverloadedError, match=r"503: .*this server is stopping"):
                await late.reset(make_task(remaining_s=0.1))
            assert text_of(await environment.step(turn("grade 3"))) == "OK 1.0"
            assert (await environment.step(turn("stop"))).reward == 2.0
            assert server.process.poll() is None
            await environment.close()
            await until(lambda: server.process.poll() is not None)
        assert server.process.returncode == 0


@pytest.mark.slow
async def test_a_server_that_is_killed_costs_its_samples_and_nothing_else(
    bus: Bus, engine: SimulatedEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """Their group is published by the same delivery, with their tokens; the next one is played when it is back."""
    port = free_ports(1)[0]
    settings = (
        ECHO,
        f"--worker.environments.KillsItsServer={HERE}:KillsItsServer",
        f"--environment_server.port={port}",
    )
    url = f"http://127.0.0.1:{port}"
    recipe = make_recipe(
        engine.replica.address, environments={name: {"url": url} for name in ("Echo", "KillsItsServer")}
    )
    async with working(recipe):
        with environment_server(*settings) as server:
            await publish(bus, make_prompt(run_name, environment="KillsItsServer"))
            [group] = await until_done(bus, 1)
            assert server.process.wait(HANG_S) == -signal.SIGKILL
        assert (group.error, group.num_deliveries) == ("", 1)
        assert [sample.finish_reason for sample in group.samples] == ["error", "error"]
        assert all(sample.num_own_tokens > 0 and url in sample.error for sample in group.samples)
        await publish(bus, make_prompt(run_name, 1, environment="Echo", limits=Limits(max_turns=2)))
        with environment_server(*settings):
            [_, group] = await until_done(bus, 2)
        assert [sample.finish_reason for sample in group.samples] == ["environment", "environment"]
        assert await count(bus, bus.dead) == 0
