"""An OpenAI-compatible server: what each of its answers means, and when it is asked again.

Invariant: a request ends with an answer, with an error of its prompt alone, or with one that ends the evaluation.
"""

import asyncio
import email.utils
import os
import random
import time
from collections.abc import Mapping
from typing import Any, Final

import httpx
import structlog

from penstock.errors import ConfigError, InvalidRequestError, SetupError
from penstock.runtime.backoff import Backoff

log = structlog.get_logger()

MAX_TRIES: Final = 8
"""Failed tries at one answer, over about a minute: enough for a server that restarts."""
_LIMITED_PATIENCE_S: Final = 900.0
"""Seconds for which one request is told that there are too many, such as by a limit per minute."""
_NO_QUOTA: Final = "insufficient_quota"
"""OpenAI's word, under the same status, for an account that is used up."""
_BACKOFF = Backoff(first_s=0.5, max_s=20.0)
_TIMEOUT = httpx.Timeout(900.0, connect=10.0)
API_KEY: Final = "OPENAI_API_KEY"
"""Environment variable with the key of --url."""
_REFUSED = frozenset({401, 403, 404})
"""Statuses that every other request would also get."""
_TOO_MANY: Final = 429
_PASSING = frozenset({408, 409, 425, _TOO_MANY})
"""Statuses below 500 that the same request may not get again."""
_AT_A_PROMPT = frozenset({500, 504})
"""Statuses that one prompt may cause again and again; others from 500 on are about the server."""
_COMPLETIONS: Final = "/chat/completions"
_MODELS: Final = "/models"
_ADDRESS: Final = "give the address of the API itself, up to /v1"
_SHOWN_CHARS: Final = 100
"""Of an answer that is none of an API's."""
_MAX_TOKENS: Final = "max_tokens"
_NEWER_MAX_TOKENS: Final = "max_completion_tokens"
"""What OpenAI's reasoning models take in place of `max_tokens`, which servers of other models may not know."""


def read_api_key(environment: Mapping[str, str] = os.environ) -> str:
    """Return the key of --url, without white space around it; empty if there is none.

    Raises:
        ConfigError: it has characters that no HTTP header can have. The message shows none of the key.
    """
    key = environment.get(API_KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{API_KEY} has characters that no key has, such as a line break or a curly quote; set it anew"
        )
    return key


class OpenAiServer:
    """Asks a server, and again where that may help. Close it after use."""

    def __init__(self, url: str, *, api_key: str) -> None:
        """Prepare to ask.

        Args:
            url: URL of the API, up to `/v1`.
            api_key: The server's API key; empty: none.
        """
        self.url = url.rstrip("/")
        self._max_tokens_name = _MAX_TOKENS
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(headers=headers, timeout=_TIMEOUT, limits=httpx.Limits(max_connections=None))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def only_model(self) -> str:
        """Return the server's name of its model.

        Raises:
            ConfigError: it has several models, rejects every request, or is no OpenAI-compatible API.
            SetupError: it does not answer.
        """
        try:
            answer = await self._answered("GET", _MODELS, None, max_tries=1)
        except InvalidRequestError as error:
            raise self._lists_no_models(str(error)) from None
        models = answer.get("data")
        if not isinstance(models, list):
            raise self._lists_no_models(f"it answered {str(answer)[:_SHOWN_CHARS]}")
        names = [str(each["id"]) for each in models if isinstance(each, Mapping) and "id" in each]
        if len(names) != 1:
            raise ConfigError(
                f"--url {self.url} has {len(names)} models ({', '.join(sorted(names)[:10])}); name one with --url-model"
            )
        return names[0]

    def _lists_no_models(self, why: str) -> ConfigError:
        return ConfigError(
            f"--url {self.url} lists no models as an OpenAI-compatible API does: {why}; {_ADDRESS}, or name its model "
            "with --url-model"
        )

    async def complete(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request for completions, in which `max_tokens` gets the name that the model takes.

        Raises:
            InvalidRequestError: the server rejects this prompt, or fails at it and not at others.
            ConfigError: it rejects every request.
            SetupError: it stops answering.
        """
        try:
            return await self._answered("POST", _COMPLETIONS, self._named(request))
        except _UnsupportedMaxTokensError:
            self._max_tokens_name = _NEWER_MAX_TOKENS
            return await self._answered("POST", _COMPLETIONS, self._named(request))

    def _named(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {self._max_tokens_name if name == _MAX_TOKENS else name: value for name, value in request.items()}

    async def _answered(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, max_tries: int = MAX_TRIES
    ) -> dict[str, Any]:
        """Send a request and return the server's answer, after at most `max_tries` tries that fail.

        By hand, not by tenacity as Penstock's own clients: each status has an outcome of its own.
        """
        num_failures = num_limited = 0
        limited_until: float | None = None
        while True:
            response: httpx.Response | None = None
            try:
                response = await self._http.request(method, f"{self.url}{path}", json=body)
            except httpx.InvalidURL as error:
                raise ConfigError(f"--url {self.url}: {error}; give http://host:port/v1") from None
            except httpx.UnsupportedProtocol:
                raise ConfigError(f"--url {self.url} must begin with http:// or https://") from None
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                if response.status_code < 400:
                    return self._object(response, path)
                reason = f"HTTP {response.status_code}: {response.text[:300]}"
                self._require_passing(response, reason, path, body)
                if response.status_code == _TOO_MANY:
                    num_limited += 1
                    limited_until = limited_until or time.monotonic() + _LIMITED_PATIENCE_S
                    wait_s = max(retry_after_s(response.headers), _wait_after(num_limited))
                    if time.monotonic() + wait_s > limited_until:
                        raise SetupError(
                            f"--url {self.url} refuses one request for more than {_LIMITED_PATIENCE_S:g} s (now for "
                            f"{wait_s:.0f} s more): {reason}; lower worker.concurrency, the prompts that are asked at "
                            "once, or go on later with --resume"
                        )
                    await self._pause(reason, wait_s)
                    continue
            num_failures += 1
            if num_failures == max_tries:
                may_be_the_prompt = response is None or response.status_code in _AT_A_PROMPT
                if may_be_the_prompt and body is not None and await self._answers_another(body):
                    raise InvalidRequestError(f"{self.url} fails at the prompt: {reason}")
                raise SetupError(f"--url {self.url} does not answer: {reason}; start it, or check the address")
            await self._pause(reason, _wait_after(num_failures))

    def _object(self, response: httpx.Response, path: str) -> dict[str, Any]:
        """Return the content of an answer without an error.

        Raises:
            ConfigError: it is a redirect.
            InvalidRequestError: it is no JSON object.
        """
        if response.has_redirect_location:
            address = str(response.url.join(response.headers["location"])).removesuffix(path)
            raise ConfigError(f"--url {self.url} redirects to {address}, which is not followed; {_ADDRESS}")
        try:
            content = response.json()
        except ValueError:
            content = None
        if not isinstance(content, dict):
            kind, text = response.headers.get("content-type", "no type"), response.text[:_SHOWN_CHARS]
            raise InvalidRequestError(f"{response.url} answered no JSON object, but {kind}: {text!r}")
        return content

    def _require_passing(
        self, response: httpx.Response, reason: str, path: str, body: Mapping[str, Any] | None
    ) -> None:
        """Raise the error of an answer that the same request would get again; return if it may pass."""
        if response.status_code in _REFUSED or _NO_QUOTA in response.text:
            raise ConfigError(f"--url {self.url} refuses {path}: {reason}; check it and {API_KEY}")
        if response.status_code == 400 and body is not None:
            self._require_supported(body, response.text)
        if response.status_code < 500 and response.status_code not in _PASSING:
            raise InvalidRequestError(f"{self.url} refuses {path if body is None else 'the prompt'}: {reason}")

    def _require_supported(self, body: Mapping[str, Any], refusal: str) -> None:
        """Raise an error of its own if a refusal with status 400 is of a parameter that every request has."""
        if "unsupported" not in refusal.lower():
            return
        if _MAX_TOKENS in body and _MAX_TOKENS in refusal:
            raise _UnsupportedMaxTokensError
        if "temperature" in refusal:
            raise ConfigError(
                f"--url {self.url} refuses temperature = {body['temperature']}: {refusal[:300]}; set temperature = 1 "
                "in the evaluation set"
            )

    async def _answers_another(self, body: Mapping[str, Any]) -> bool:
        """Return whether the server answers a prompt at which no model fails, so that `body` is at fault."""
        easy = {"model": body["model"], "messages": [{"role": "user", "content": "Hello"}], self._max_tokens_name: 16}
        try:
            response = await self._http.post(f"{self.url}{_COMPLETIONS}", json=easy)
        except httpx.TransportError:
            return False
        return response.is_success

    async def _pause(self, reason: str, wait_s: float) -> None:
        log.warning("evaluation.request_retried", url=self.url, reason=reason, wait_s=round(wait_s, 1))
        await asyncio.sleep(wait_s)


class _UnsupportedMaxTokensError(Exception):
    """The server's model takes `max_completion_tokens` in place of `max_tokens`."""


def _wait_after(num_failures: int) -> float:
    return _BACKOFF.after(num_failures) * random.uniform(0.5, 1.0)


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Return the seconds that an answer's `Retry-After` asks to wait; 0 without one.

    A date counts from the answer's own `Date`, since this machine's clock may differ.
    """
    value = headers.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        until, now = (email.utils.parsedate_to_datetime(each) for each in (value, headers.get("date", "")))
        return max(0.0, (until - now).total_seconds())
    except (ValueError, TypeError):  # no date, or only one of them with a zone
        return 0.0
