"""Plays an evaluation against an OpenAI-compatible server with any model: single-turn prompts, each answered
`samples_per_prompt` times, images as data URIs.
"""

import asyncio
import base64
import json
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

import msgspec
import structlog

from penstock.clients import RewardClient
from penstock.errors import ConfigError, InvalidRequestError
from penstock.model.images import image_format
from penstock.names import SINGLE_TURN
from penstock.records import Message, Sampling, TextPart, text_for_verifiers
from penstock.v1 import reward_pb2
from penstock.verdict_status import UNJUDGED, Status
from services.trainer.data.rows.example import Example
from services.trainer.evaluation.evaluation import FailureCheck, OnPlayed
from services.trainer.evaluation.openai_server import OpenAiServer
from services.trainer.evaluation.outcome import PlayedPrompt, PlayedSample
from services.trainer.evaluation.sets import MAX_CHECKED_ROWS, EvaluationSet

log = structlog.get_logger()

_VERIFY_PATIENCE_S = 900.0


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
        self._server = OpenAiServer(url, api_key=api_key)
        self._verifier = verifier
        self._concurrency = concurrency

    async def __aenter__(self) -> Self:
        """Find the model.

        Raises:
            ConfigError: the server rejects the key, or has several models and none was named.
            SetupError: no server answers.
        """
        try:
            if not self.model:
                self.model = await self._server.only_model()
        except BaseException:
            await self._server.close()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Close the connections."""
        await self._server.close()

    async def play(
        self, sets: Mapping[str, EvaluationSet], *, on_played: OnPlayed, played: Collection[tuple[str, int]] = ()
    ) -> None:
        """Play every row of `sets`, await `on_played` with each outcome, and return when each row has one.

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
                await on_played(outcome)
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
            "max_tokens": sampling.max_new_tokens,
            **({"top_p": sampling.top_p} if sampling.top_p != 1 else {}),
            **({"top_k": sampling.top_k} if sampling.top_k else {}),
            **({"tools": list(example.tools)} if example.tools else {}),
            **({"chat_template_kwargs": dict(example.chat_template_kwargs)} if example.chat_template_kwargs else {}),
        }

    async def _ask(self, request: Mapping[str, Any]) -> PlayedSample:
        """Return an unjudged answer; see `OpenAiServer.complete` for what it raises."""
        answer = await self._server.complete(request)
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
        raise InvalidRequestError(f"{self._server.url} gave an answer without choices: {str(answer)[:200]}")

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
