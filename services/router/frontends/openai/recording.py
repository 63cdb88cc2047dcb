"""Records calls for training, and returns the records."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.bus.recordings import RecordedPage, Recordings
from penstock.records import RecordedCall
from services.router.frontends.openai.choice import Choice
from services.router.frontends.openai.parsed_request import ParsedRequest
from services.router.frontends.openai.responses import spans_json


async def record(recordings: Recordings, request: ParsedRequest, choices: Sequence[Choice]) -> None:
    """Record each choice under the session; return when all are stored.

    Raises:
        PenstockError: a choice could not be stored.
    """
    for index, choice in enumerate(choices):
        prompt = request.prompt_of(index)
        assert choice.ending is not None
        await recordings.keep(
            RecordedCall(
                session=request.session_id,
                request_id=request.request_id,
                choice=index,
                created=time.time(),
                input_ids=np.array(prompt.input_ids, "<i4"),
                images=tuple(prompt.images),
                output_ids=np.array([token.number for token in choice.tokens], "<i4"),
                logprobs=np.array([token.logprob for token in choice.tokens], "<f4"),
                version_spans=choice.version_spans,
                finish_reason=choice.ending,
                temperature=request.sampling.temperature,
                top_p=request.sampling.top_p,
                top_k=request.sampling.top_k,
                num_prompt_tokens=choice.num_prompt_tokens,
                num_cached_tokens=choice.num_cached_tokens,
                text=choice.content,
            )
        )


def page_json(page: RecordedPage) -> bytes:
    """Return the page as JSON, images in base64. Takes milliseconds per MiB, too long for an event loop."""
    data = [_call_json(number, call) for number, call in page.calls]
    return msgspec.json.encode({"object": "list", "data": data, "has_more": page.has_more})


def _call_json(number: int, call: RecordedCall) -> dict[str, Any]:
    return {
        "number": number,
        "session_id": call.session,
        "request_id": call.request_id,
        "choice": call.choice,
        "created": call.created,
        "prompt_token_ids": call.input_ids.tolist(),
        "images": call.images,
        "token_ids": call.output_ids.tolist(),
        "token_logprobs": call.logprobs.tolist(),
        "policy_version_spans": spans_json(call.version_spans),
        "finish_reason": call.finish_reason,
        "temperature": call.temperature,
        "top_p": call.top_p,
        "top_k": call.top_k,
        "num_prompt_tokens": call.num_prompt_tokens,
        "text": call.text,
    }
