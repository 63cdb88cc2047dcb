"""Plays an evaluation against an OpenAI-compatible server with any model: single-turn prompts, each answered
`samples_per_prompt` times, images as data URIs.
"""

import asyncio
import base64
import email.utils
import json
import os
import random
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Self

import httpx
import msgspec
import structlog

from penstock.clients import RewardClient
from penstock.errors import ConfigError, InvalidRequestError, SetupError
from penstock.model.images import image_format
from penstock.names import SINGLE_TURN
from penstock.records import Message, Sampling, TextPart, text_for_verifiers
from penstock.runtime.backoff import Backoff
from penstock.v1 import reward_pb2
from penstock.verdict_status import UNJUDGED, Status
from services.trainer.data.rows.example import Example
from services.trainer.evaluation.evaluation import FailureCheck, OnPlayed
from services.trainer.evaluation.outcome import PlayedPrompt, PlayedSample
from services.trainer.evaluation.sets import MAX_CHECKED_ROWS, EvaluationSet

log = structlog.get_logger()

MAX_ATTEMPTS: Final = 8
"""Failed attempts at one answer, over about a minute: enough for a server that restarts."""
_LIMITED_PATIENCE_S: Final = 900.0
"""Seconds for which one request is told that there are too many, such as by a limit per minute."""
_NO_QUOTA: Final = "insufficient_quota"
"""OpenAI's word, under the same status, for an account that is used up."""
_BACKOFF = Backoff(first_s=0.5, max_s=20.0)
_TIMEOUT = httpx.Timeout(900.0, connect=10.0)
_VERIFY_PATIENCE_S = 900.0
API_KEY: Final = "OPENAI_API_KEY"
"""Environment variable with the key of --url."""
_REFUSED = frozenset({401, 403, 404})
"""Statuses that every other request would also get."""
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


class OpenAiPlayer:
    """Asks a server for answers and the reward service for verdicts. Use it as a context manager."""

    def __init__(self, url: str, *, model: str, api_key: str, verifier: RewardClient, concurrency: int) -> None:
        """Prepare to ask.

        Args:
            url: URL of the API, up to `/v1`.
            model: The server's name of the model; empty: its only model.
            api_key: The server's API key; empty: none.
            verifier: Judges the answers.
            concurrency: Prompts to play at once.
        """
        self.model = model
        self._url = url.rstrip("/")
        self._verifier = verifier
        self._concurrency = concurrency
        self._max_tokens_name = _MAX_TOKENS
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(headers=headers, timeout=_TIMEOUT, limits=httpx.Limits(max_connections=None))

    async def __aenter__(self) -> Self:
        """Find the model.

        Raises:
            ConfigError: the server rejects the key, or has several models and none was named.
            SetupError: no server answers.
        """
        try:
            if not self.model:
                self.model = await self._only_model()
        except BaseException:
            await self._http.aclose()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def play(
        self, sets: Mapping[str, EvaluationSet], *, on_played: OnPlayed, played: Collection[tuple[str, int]] = ()
    ) -> None:
        """Play every row of `sets`, call `on_played` with each outcome, and return when each row has one.

        Rows in `played`, by set and number, are left out.

        Raises:
            ConfigError: a row's environment needs an engine, or the server rejects every request.
            DataError: no row of a set can be played.
            SetupError: the server or the reward service stops answering.
        """
        rows = iter(
            [(each, row) for name, each in sets.items() for row in range(len(each)) if (name, row) not in played]
        )
        failures = FailureCheck(played)

        async def play_rows() -> None:
            for each, row in rows:  # shared: each takes the next
                outcome = await self._play(each, row)
                on_played(outcome)
                failures.add(outcome)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._concurrency):
                tasks.create_task(play_rows())

    async def _play(self, played: EvaluationSet, row: int) -> PlayedPrompt:
        example = await asyncio.to_thread(played.__getitem__, row)
        _require_single_turn(played, example.environment)
        outcome = played.described(row, example)
        request = self._request(example, played.sampling(example))
        try:
            answers = await self._ask_all(request, num_samples=played.config.samples_per_prompt)
            samples = await self._judge(f"{played.name}/{row}", example, answers)
        except InvalidRequestError as error:
            log.warning("evaluation.prompt_failed", set=played.name, row=row, reason=str(error))
            return msgspec.structs.replace(outcome, error=str(error))
        return msgspec.structs.replace(outcome, samples=samples)

    async def _ask_all(self, request: Mapping[str, Any], *, num_samples: int) -> list[PlayedSample]:
        try:
            async with asyncio.TaskGroup() as tasks:
                asking = [tasks.create_task(self._ask(request)) for _ in range(num_samples)]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in asking]

    def _request(self, example: Example, sampling: Sampling) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": _messages(example),
            "temperature": sampling.temperature,
            self._max_tokens_name: sampling.max_new_tokens,
            **({"top_p": sampling.top_p} if sampling.top_p != 1 else {}),
            **({"top_k": sampling.top_k} if sampling.top_k else {}),
            **({"tools": list(example.tools)} if example.tools else {}),
            **({"chat_template_kwargs": dict(example.chat_template_kwargs)} if example.chat_template_kwargs else {}),
        }

    async def _ask(self, request: Mapping[str, Any]) -> PlayedSample:
        """Return an unjudged answer.

        Raises:
            InvalidRequestError: the server rejects this prompt.
            ConfigError: it rejects every request.
            SetupError: it stops answering.
        """
        try:
            answer = await self._answered("POST", "/chat/completions", request)
        except _UnsupportedMaxTokensError:
            self._max_tokens_name = _NEWER_MAX_TOKENS
            newer = {_NEWER_MAX_TOKENS if name == _MAX_TOKENS else name: value for name, value in request.items()}
            answer = await self._answered("POST", "/chat/completions", newer)
        match answer:
            case {"choices": [{"message": {**message}, **choice}, *_]}:
                usage = answer.get("usage") or {}
                return PlayedSample(
                    text=str(message.get("content") or ""),
                    score=None,
                    extracted="",
                    status="",
                    finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
                    num_tokens=int(usage.get("completion_tokens") or 0),
                )
        raise InvalidRequestError(f"{self._url} gave an answer without choices: {str(answer)[:200]}")

    async def _judge(self, item_id: str, example: Example, samples: Sequence[PlayedSample]) -> tuple[PlayedSample, ...]:
        """Return the samples with their verdicts.

        Raises:
            InvalidRequestError: the gold answer or the profile is invalid.
        """
        asked = text_for_verifiers(example.messages)
        items = [
            reward_pb2.VerifyItem(
                item_id=f"{item_id}/{number}",
                golds=example.golds,
                response=sample.text,
                profile=example.profile,
                prompt=asked,
            )
            for number, sample in enumerate(samples)
        ]
        verdicts = await self._verifier.verify_batch(
            items, timeout_s=60.0, retry_until=time.monotonic() + _VERIFY_PATIENCE_S
        )
        return tuple(_judged(sample, verdict, example) for sample, verdict in zip(samples, verdicts, strict=True))

    async def _only_model(self) -> str:
        answer = await self._answered("GET", "/models", None, max_attempts=1)
        names = [str(each["id"]) for each in answer.get("data") or () if isinstance(each, Mapping) and "id" in each]
        if len(names) != 1:
            raise ConfigError(
                f"--url {self._url} has {len(names)} models ({', '.join(sorted(names)[:10])}); name one with "
                "--url-model"
            )
        return names[0]

    async def _answered(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, max_attempts: int = MAX_ATTEMPTS
    ) -> dict[str, Any]:
        """Send a request and return the server's answer, after at most `max_attempts` attempts that fail.

        By hand, not by tenacity as Penstock's own clients: each status has an outcome of its own.
        """
        num_failures = num_limited = 0
        limited_until: float | None = None
        while True:
            try:
                response = await self._http.request(method, f"{self._url}{path}", json=body)
            except httpx.InvalidURL as error:
                raise ConfigError(f"--url {self._url}: {error}; give http://host:port/v1") from None
            except httpx.UnsupportedProtocol:
                raise ConfigError(f"--url {self._url} must begin with http:// or https://") from None
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                if response.status_code < 400:
                    return _object(response)
                reason = f"HTTP {response.status_code}: {response.text[:300]}"
                if response.status_code in _REFUSED or _NO_QUOTA in response.text:
                    raise ConfigError(f"--url {self._url} refuses {path}: {reason}; check it and {API_KEY}")
                if response.status_code == 400 and body is not None:
                    self._require_supported(body, response.text)
                if response.status_code == 429:
                    num_limited += 1
                    limited_until = limited_until or time.monotonic() + _LIMITED_PATIENCE_S
                    wait_s = max(retry_after_s(response.headers), _wait_after(num_limited))
                    if time.monotonic() + wait_s > limited_until:
                        raise SetupError(
                            f"--url {self._url} refuses one request for more than {_LIMITED_PATIENCE_S:g} s (now for "
                            f"{wait_s:.0f} s more): {reason}; lower worker.concurrency, the prompts that are asked at "
                            "once, or go on later with --resume"
                        )
                    await self._pause(reason, wait_s)
                    continue
                if response.status_code < 500:
                    raise InvalidRequestError(f"{self._url} refuses the prompt: {reason}")
            num_failures += 1
            if num_failures == max_attempts:
                raise SetupError(f"--url {self._url} does not answer: {reason}; start it, or check the address")
            await self._pause(reason, _wait_after(num_failures))

    async def _pause(self, reason: str, wait_s: float) -> None:
        log.warning("evaluation.request_retried", url=self._url, reason=reason, wait_s=round(wait_s, 1))
        await asyncio.sleep(wait_s)

    def _require_supported(self, body: Mapping[str, Any], refusal: str) -> None:
        """Raise an error of its own if a refusal with status 400 is of a parameter that every request has."""
        if "unsupported" not in refusal.lower():
            return
        if _MAX_TOKENS in body and _MAX_TOKENS in refusal:
            raise _UnsupportedMaxTokensError
        if "temperature" in refusal:
            raise ConfigError(
                f"--url {self._url} refuses temperature = {body['temperature']}: {refusal[:300]}; set temperature = 1 "
                "in the evaluation set"
            )


def require_single_turn(sets: Mapping[str, EvaluationSet]) -> None:
    """Check, before anything is started, that the first rows of every set can be played over an API.

    Raises:
        ConfigError: the environment of a set or of a row needs an engine.
        DataError: a row is invalid.
    """
    for each in sets.values():
        if not each.config.environment_column:
            _require_single_turn(each, each.config.environment)
            continue
        for row in range(min(len(each), MAX_CHECKED_ROWS)):
            _require_single_turn(each, each[row].environment)


def _require_single_turn(played: EvaluationSet, environment: str) -> None:
    if environment != SINGLE_TURN:
        raise ConfigError(
            f"evaluation.sets.{played.name}: environment {environment!r} cannot be played by --url, which has no "
            f"turns; use --model, or environment = {SINGLE_TURN!r}"
        )


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


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        content = response.json()
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise InvalidRequestError(f"{response.url} answered with something else than a JSON object")
    return content


def _judged(sample: PlayedSample, verdict: reward_pb2.Verdict, example: Example) -> PlayedSample:
    status = reward_pb2.VerdictStatus.Name(verdict.status).removeprefix("VERDICT_STATUS_")
    if status == Status.GOLD_INVALID:
        raise InvalidRequestError(f"gold answers {list(example.golds)} cannot be read by profile {example.profile!r}")
    return msgspec.structs.replace(
        sample,
        score=None if status in UNJUDGED else verdict.score,
        status=status,
        extracted=verdict.extracted,
    )


def _messages(example: Example) -> list[dict[str, Any]]:
    """Return the messages of a prompt; a tool's message answers the first unanswered call."""
    messages: list[dict[str, Any]] = []
    open_ids: deque[str] = deque()
    for index, message in enumerate(example.messages):
        found: dict[str, Any] = {"role": message.role, "content": _content(message, example.images)}
        if message.tool_calls:
            ids = [f"call_{index}_{number}" for number in range(len(message.tool_calls))]
            open_ids.extend(ids)
            found["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for call_id, call in zip(ids, message.tool_calls, strict=True)
            ]
        elif message.role == "tool" and open_ids:
            found["tool_call_id"] = open_ids.popleft()
        messages.append(found)
    return messages


def _content(message: Message, images: Sequence[bytes]) -> str | list[dict[str, Any]]:
    if all(isinstance(part, TextPart) for part in message.parts):
        return "".join(part.text for part in message.parts if isinstance(part, TextPart))
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, TextPart)
        else {"type": "image_url", "image_url": {"url": _data_uri(images[part.index])}}
        for part in message.parts
    ]


def _data_uri(image: bytes) -> str:
    return f"data:image/{image_format(image)};base64,{base64.b64encode(image).decode()}"
