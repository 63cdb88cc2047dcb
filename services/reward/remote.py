"""Verification by another service over HTTP, in the format of slime's `remote_rm`.

One request is POST {"prompt", "response", "label"}; the answer is a bare JSON number, or an object with the number as
`score` or `reward`. The label is the gold answer, or a list if there are several. A failure is a finding with status
FAILED and a logged reason, never a silent 0.
"""

import asyncio
import json
import math
import ssl
import time
from http import HTTPStatus
from typing import Any

import httpx
import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from penstock.runtime.security import REMOTE_TOKEN, Tls, read_secret
from penstock.verdict_status import Status
from services.reward.config import MAX_TRIES, RemoteConfig
from services.reward.isolation.tasks import sendable
from services.reward.item import Item
from services.reward.verdict import Finding, Method

log = structlog.get_logger()

_BACKOFF = wait_random_exponential(multiplier=0.2, max=5.0)
_WORTH_ANOTHER_TRY = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})


class _RemoteError(Exception):
    """The remote service returned no number; another try would not help."""


class RemoteVerifier:
    """A client of the remote service, with persistent connections. Close it after use."""

    def __init__(self, config: RemoteConfig, tls: Tls | None = None, *, max_tries: int = MAX_TRIES) -> None:
        """Trust the authorities of `tls` beside the public ones, if the service speaks https."""
        self._config = config
        self._max_tries = max_tries
        self._slots = asyncio.Semaphore(config.max_concurrency)
        # Its token differs from that of this process's own ports, because it may be any third party's service.
        token = read_secret(REMOTE_TOKEN)
        self._client = httpx.AsyncClient(
            timeout=None,  # httpx's own limits apply to each read separately
            limits=httpx.Limits(
                max_connections=config.max_concurrency, max_keepalive_connections=config.max_concurrency
            ),
            trust_env=False,  # use the configured URL, whatever proxies the environment names
            headers={"Authorization": f"Bearer {token}"} if token else {},
            verify=_tls_context(tls),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def verify(self, item: Item, deadline_s: float) -> tuple[Finding, float]:
        """Ask the remote service; return its finding and the seconds that it took, without queueing."""
        async with self._slots:
            started = time.monotonic()
            finding = await self._verify_within(item, deadline_s)
            return finding, time.monotonic() - started

    async def _verify_within(self, item: Item, deadline_s: float) -> Finding:
        reason = "no try was finished"
        retrying = AsyncRetrying(
            retry=retry_if_exception_type((TimeoutError, httpx.HTTPError)),
            wait=_BACKOFF,
            stop=stop_after_attempt(self._max_tries),
            reraise=True,
        )
        deadline = asyncio.timeout(deadline_s)
        try:
            async with deadline:
                async for each in retrying:
                    with each:
                        try:
                            return await self._try(item)
                        except (TimeoutError, httpx.HTTPError) as error:
                            reason = self._describe(error)
                            raise
        except (TimeoutError, httpx.HTTPError):
            if deadline.expired():
                log.warning("remote.failed", reason=f"the deadline of {deadline_s:g} s passed; {reason}")
                return Finding(status=Status.TIMEOUT)
        except _RemoteError as error:
            reason = str(error)
        log.warning("remote.failed", reason=reason)
        return Finding(status=Status.FAILED)

    async def _try(self, item: Item) -> Finding:
        async with asyncio.timeout(self._config.timeout_s):
            credit = await self._ask(item)
        return Finding(status=Status.OK, credit=credit, method=Method.VERIFIER)

    def _describe(self, error: Exception) -> str:
        match error:
            case TimeoutError():
                return f"a try took longer than {self._config.timeout_s:g} s"
            case httpx.HTTPStatusError():  # its text has the URL, which may hold a secret
                return f"it answered with HTTP status {error.response.status_code}"
            case _:
                return f"{type(error).__name__}: {error}"

    async def _ask(self, item: Item) -> float:
        golds = [sendable(gold) for gold in item.golds]
        body = {
            "prompt": sendable(item.prompt),
            "response": sendable(item.response),
            "label": golds[0] if len(golds) == 1 else golds,
        }
        answer = await self._client.post(self._config.url, json=body)
        if answer.is_error and (answer.is_server_error or answer.status_code in _WORTH_ANOTHER_TRY):
            answer.raise_for_status()
        if not answer.is_success:
            raise _RemoteError(f"it answered with HTTP status {answer.status_code}: {answer.text[:200]!r}")
        return _read_number(answer.content)


def _tls_context(tls: Tls | None) -> ssl.SSLContext:
    """Return the context for https, with the public authorities and those of [security]."""
    context = httpx.create_ssl_context(trust_env=False)
    if tls is not None and tls.ca_file is not None:
        context.load_verify_locations(tls.ca_file)
    if tls is not None and tls.certificate_file is not None:
        context.load_cert_chain(tls.certificate_file, tls.key_file)
    return context


def _read_number(content: bytes) -> float:
    try:
        value: Any = json.loads(content, parse_int=float)
    except (ValueError, RecursionError):
        raise _RemoteError(f"the answer is not JSON: {content[:200]!r}") from None
    if isinstance(value, dict):
        value = value.get("score", value.get("reward"))
    if not isinstance(value, float) or not math.isfinite(value):
        raise _RemoteError(f"it answered {content[:200]!r}; it must answer a number, or one as score or reward")
    return value
