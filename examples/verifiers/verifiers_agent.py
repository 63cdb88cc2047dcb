"""Plays environments of verifiers (its v1 interface) as an agent that Penstock trains. It runs where verifiers is
installed, and needs nothing of Penstock:

    python verifiers_agent.py rows TASKSET --num 1000 > rows.jsonl
    python verifiers_agent.py serve TASKSET --port 9000

TASKSET is what `eval` of verifiers takes: an importable package. The recipe has `[worker.agents.NAME]` with
`url = "http://127.0.0.1:9000/play"`; a row's column `index` says which task is played. docs/rollouts/environments.md
says more.
"""

import argparse
import asyncio
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

from aiohttp import web
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.env import Env
from verifiers.v1.episode import Episode
from verifiers.v1.task import Task
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


class Tasks:
    """A taskset's tasks by their number, loaded as far as they are asked for."""

    def __init__(self, env: Env) -> None:
        self._coming: Iterator[Task] = iter(env.taskset.load())
        self._loaded: list[Task] = []

    def find(self, index: int) -> Task:
        """Task `index`, from 0."""
        missing = index + 1 - len(self._loaded)
        self._loaded += itertools.islice(self._coming, max(0, missing))
        if not 0 <= index < len(self._loaded):
            raise ValueError(f"index = {index}: the taskset has {len(self._loaded)} tasks; write its rows again")
        return self._loaded[index]


class Player:
    """Plays samples; one environment serves all of them."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self._tasks = Tasks(env)

    async def handle(self, request: web.Request) -> web.Response:
        """POST /play, as docs/rollouts/agents.md describes it."""
        given = await request.json()
        return web.json_response(await self.play(given))

    async def play(self, given: dict[str, Any]) -> dict[str, Any]:
        """Play one episode against the session's URL, with a key that only its calls know."""
        variable = f"PENSTOCK_SESSION_{id(given)}"
        os.environ[variable] = given["api_key"]
        client = EvalClientConfig(base_url=given["base_url"], api_key_var=variable)
        try:
            task = self._tasks.find(given["task"]["extra"]["index"])
            async with asyncio.timeout(given["timeout_s"] + 75.0):
                return read(await self._env.run_episode(task, ModelContext(model=given["model"], client=client)))
        except (KeyError, ValueError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        finally:
            del os.environ[variable]

    async def serving(self, _: web.Application) -> AsyncIterator[None]:
        """Hold what episodes share, such as tool servers."""
        async with self._env.serving():
            yield


def read(episode: Episode) -> dict[str, Any]:
    """The episode's reward and metrics; tokens are none of its business."""
    failures = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        return {"error": "; ".join(f"{error.type}: {error.message}" for error in failures) or "it failed"}
    metrics = {name: value for trace in episode.traces for name, value in trace.metrics.items() if value is not None}
    return {"reward": sum(trace.reward for trace in episode.traces if trace.agent.trainable), "metrics": metrics}


def write_rows(env: Env, num: int) -> None:
    """A line of JSON for each task: its prompt for people, and its number."""
    for index, task in enumerate(itertools.islice(env.taskset.load(), num)):
        prompt = task.data.prompt if isinstance(task.data.prompt, str) else f"{task.key} {index}"
        json.dump({"problem": prompt, "answer": "-", "index": index}, sys.stdout)
        sys.stdout.write("\n")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["rows", "serve"])
    parser.add_argument("taskset")
    parser.add_argument("--num", type=int, default=1000, help="how many rows to write")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--env", type=json.loads, default={}, help="further settings of the environment, as JSON")
    given = parser.parse_args()
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    env = load_environment(resolve_env_config({"taskset": {"id": given.taskset}, "agent": agent, **given.env}))
    if given.command == "rows":
        write_rows(env, given.num)
        return
    player = Player(env)
    app = web.Application(client_max_size=2**28)
    app.router.add_post("/play", player.handle)
    app.cleanup_ctx.append(player.serving)
    web.run_app(app, host="127.0.0.1", port=given.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
