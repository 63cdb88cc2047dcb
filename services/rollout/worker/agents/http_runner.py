"""Calls runners that are services: one POST for each sample."""

import functools
import json
import ssl

import httpx

from penstock.agents import AgentResult, AgentSession
from services.rollout.worker.agents.runners import MAX_OUTPUT_BYTES, RunnerError, parse_result

_CONNECT_S = 10.0
_MAX_SHOWN_BYTES = 500


@functools.cache
def _trust() -> ssl.SSLContext:
    """Read this machine's certificate authorities once: it takes 50 ms, and would block the worker's other episodes."""
    return httpx.create_ssl_context()


class HttpRunner:
    """Posts the session to a URL. The response is the result; leaving early closes the connection."""

    def __init__(self, url: str) -> None:
        """Post to `url`."""
        self._url = url

    async def run(self, session: AgentSession) -> AgentResult:
        """See `RunnerCaller`."""
        text = bytearray()
        try:
            async with (
                httpx.AsyncClient(
                    timeout=httpx.Timeout(None, connect=_CONNECT_S),
                    trust_env=False,  # use the configured URL, whatever proxies the environment names
                    verify=_trust(),
                ) as client,
                client.stream("POST", self._url, json=session.to_json()) as answer,
            ):
                async for part in answer.aiter_bytes():
                    text += part
                    if len(text) > MAX_OUTPUT_BYTES:
                        raise RunnerError(
                            f"{self._url} answered more than {MAX_OUTPUT_BYTES} bytes; return a result only"
                        )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RunnerError(f"{self._url} does not answer: {type(error).__name__} {error}".rstrip()) from None
        shown = text[:_MAX_SHOWN_BYTES].decode(errors="replace")
        if answer.status_code != 200:
            raise RunnerError(f"{self._url} answered {answer.status_code}: {shown}")

        def parse(body: bytes) -> object:
            try:
                return json.loads(body)
            except (ValueError, RecursionError):
                raise RunnerError(f"{self._url} answered {shown!r}, which is not JSON") from None

        return await parse_result(parse, bytes(text))
