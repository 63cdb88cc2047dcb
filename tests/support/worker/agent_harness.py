"""What agents play on: engines that answer by what they are shown, and a router with its HTTP API."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx

from penstock.config import BusConfig
from penstock.model.chat.chat_template import Renderer
from penstock.records import Message, Sampling, TextPart
from penstock.runtime.ports import free_ports
from penstock.runtime.security import Security
from penstock.v1 import common_pb2, generate_pb2
from services.launch.settings import service_settings
from services.recipe import Recipe
from services.router import server as router_server
from services.router.config import RouterConfig
from tests.support.waiting import promptly, until

RUNNERS = "tests.support.worker.agent_runners"
END_ID = 356
LONG = Sampling(temperature=1.0, max_new_tokens=500)
QUESTION = (Message(role="user", parts=(TextPart(text="Guess."),)),)
TEXT: dict[str, Any] = {"messages": QUESTION, "images": ()}
"""A prompt without pictures."""
PROGRAM = """
import json, ssl, sys, urllib.request
given = json.load(sys.stdin)
body = json.dumps({"model": given["model"], "messages": given["task"]["messages"]}).encode()
headers = {"Authorization": f"Bearer {given['api_key']}", "Content-Type": "application/json"}
request = urllib.request.Request(f"{given['base_url']}/chat/completions", body, headers)
tls = ssl.create_default_context(cafile=given["tls_ca"] or None)
urllib.request.urlopen(request, context=tls).read()
"""
"""A runner that makes one call with nothing but the standard library; a result follows."""


class Speaker:
    """Answers by what the prompt says: the text of the first entry whose key is in it, letter by letter in tokens that
    no tokenizer would choose."""

    def __init__(self, renderer: Renderer, answers: Sequence[tuple[str, str]]) -> None:
        self._renderer = renderer
        self._answers = answers

    def ids(self, text: str) -> list[int]:
        return [number for letter in text for number in self._renderer.render_text(letter)] + [END_ID]

    def __call__(
        self, request: generate_pb2.GenerateRequest, replica: common_pb2.Replica
    ) -> generate_pb2.GenerateResponse:
        prompt = self._renderer.decode(request.input_ids)
        ids = self.ids(next(text for key, text in self._answers if key in prompt))[: request.sampling.max_new_tokens]
        is_whole = ids[-1] == END_ID
        return generate_pb2.GenerateResponse(
            output_ids=ids,
            logprobs=[-(index + 1) / 64 for index in range(len(ids))],
            version_spans=[common_pb2.VersionSpan(num_tokens=len(ids), policy_version=replica.policy_version)],
            finish_reason=generate_pb2.FINISH_REASON_STOP if is_whole else generate_pb2.FINISH_REASON_LENGTH,
            usage=generate_pb2.Usage(
                num_prompt_tokens=len(request.input_ids) + 8 * len(request.images), num_output_tokens=len(ids)
            ),
            replica_id=replica.replica_id,
        )


def guess(number: int) -> str:
    return f'<tool_call>\n{{"name": "guess",  "arguments": {{"number": {number}}}}}\n</tool_call>'


@contextlib.asynccontextmanager
async def agent_harness(
    make_recipe: Callable[..., Recipe],
    agents: dict[str, Any],
    *,
    security: Security | None = None,
    bus: BusConfig | None = None,
    router: dict[str, Any] | None = None,
    **worker: Any,
) -> AsyncIterator[Recipe]:
    """A router during the context, and the recipe of workers with these agents; a text is an agent's function.

    Args:
        make_recipe: The fixture.
        agents: By name.
        security: Of all of them; None: none.
        bus: Another NATS server than the tests' own.
        router: Settings of the router.
        worker: Settings of the workers.
    """
    (port, http_port), stop = free_ports(2), asyncio.Event()
    tls = None if security is None or security.tls is None else security.tls.client_context()
    url = f"{'http' if tls is None else 'https'}://127.0.0.1:{http_port}"
    tables = {name: {"function": agent} if isinstance(agent, str) else agent for name, agent in agents.items()}
    recipe = make_recipe(f"127.0.0.1:{port}", agents=tables, router_url=url, **worker)
    config = RouterConfig(port=port, http_port=http_port, **(router or {}))
    recipe = recipe.model_copy(update={"router": config, "bus": bus or recipe.bus})
    serving = asyncio.create_task(
        router_server.serve(service_settings.for_router(recipe), stop, security=security or Security())
    )

    async def is_up() -> bool:
        try:
            async with httpx.AsyncClient(verify=tls or True) as client:
                return (await client.get(f"{url}/healthz")).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        await until(is_up)
        yield recipe
    finally:
        stop.set()
        await promptly(serving)
