"""Reads SGLang's responses into `Generation`, after checking that they are consistent."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.errors import InvalidRequestError, UnavailableError
from services.rollout.engine.sglang.routed_experts import read_ids

_BAD_REQUEST = 400
_FINISHED_BY = {"stop": True, "length": False}
"""Finish reasons of a complete turn, and whether a stop token caused them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TopIds:
    """The most likely ids at one position, most likely first."""

    ids: list[int]
    logprobs: list[float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """The model's scores of each prompt token but the first."""

    logprobs: list[float]
    top: list[TopIds]
    """Empty unless the request asked for the most likely ids."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Tokens of one turn: all of them, or one part of a stream."""

    output_ids: list[int]
    logprobs: list[float]
    """ln of the probability of each id: tempered, without the forbidden ids, before top-k and top-p."""
    version_spans: list[tuple[int, int]]
    """(number of tokens, policy version); they add up to the output."""
    stopped: bool | None
    """True: the last id is a stop token. False: the length limit was reached. None: more tokens will come."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens_so_far: int
    """Output tokens of the turn so far, earlier parts included."""
    top: list[TopIds] = dataclasses.field(default_factory=list)
    """Most likely ids at each token; empty unless the request asked for them."""
    prompt: PromptScores | None = None
    """Only in the first part, and only if the request asked for it."""
    routed_experts: np.ndarray | None = None
    """int32 ids of the experts of the whole turn; only in the last part, and only if the request asked for them."""
    queued_s: float | None = None
    """Seconds that SGLang's scheduler let the turn wait; None if it does not say."""
    prefill_s: float | None = None
    """Seconds from then until the prompt was computed; None if SGLang does not say."""


def require_sound(response: dict[str, Any]) -> None:
    """Raise if SGLang refused or gave up the request.

    Raises:
        InvalidRequestError: SGLang refused the request itself.
        UnavailableError: SGLang gave it up.
    """
    reason = response["meta_info"]["finish_reason"]
    if reason is None or reason["type"] in _FINISHED_BY:
        return
    message = reason.get("message", reason["type"])
    if reason.get("status_code") == _BAD_REQUEST:
        raise InvalidRequestError(f"SGLang refuses the request: {message}")
    raise UnavailableError(f"SGLang ended the request: {message}")


def num_tokens_of(response: dict[str, Any]) -> int:
    """Return the number of output tokens reported. The lists may be longer: SGLang's streams share and extend them."""
    return int(response["meta_info"]["completion_tokens"])


def read_generation(response: dict[str, Any], *, first: int = 0) -> Generation:
    """Return the tokens of a sound, cumulative response from index `first` on.

    Raises:
        RuntimeError: ids, logprobs and version spans do not match.
    """
    meta, end = response["meta_info"], num_tokens_of(response)
    output_ids = list(response["output_ids"][first:end])
    scored = meta["output_token_logprobs"][first:end]
    top = [_top_ids(entries) for entries in meta.get("output_top_logprobs", ())[first:end]]
    spans = [
        (num_tokens, int(span["version"]))
        for span in meta["weight_versions"]
        if (num_tokens := min(end, span["end"]) - max(first, span["start"])) > 0
    ]
    scored_ids = [entry[1] for entry in scored]
    num_spanned = sum(length for length, _ in spans)
    if scored_ids != output_ids or num_spanned != len(output_ids) or len(top) not in (0, len(output_ids)):
        raise RuntimeError(
            f"SGLang's response is inconsistent: {len(output_ids)} ids, {len(scored)} logprobs, "
            f"likeliest ids at {len(top)} of them, spans {spans}"
        )
    return Generation(
        output_ids=output_ids,
        logprobs=[float(entry[0]) for entry in scored],
        version_spans=spans,
        stopped=_FINISHED_BY[meta["finish_reason"]["type"]] if meta["finish_reason"] else None,
        num_prompt_tokens=meta["prompt_tokens"],
        num_cached_tokens=meta["cached_tokens"],
        num_tokens_so_far=end,
        top=top,
        prompt=_prompt_scores(meta) if first == 0 else None,
        routed_experts=None if (experts := meta.get("routed_experts")) is None else read_ids(experts),
        queued_s=meta.get("queue_time"),
        prefill_s=_prefill_s(meta),
    )


def _prefill_s(meta: dict[str, Any]) -> float | None:
    began, ended = meta.get("forward_entry_time"), meta.get("prefill_finished_time")
    return None if began is None or ended is None else max(0.0, ended - began)


def _prompt_scores(meta: dict[str, Any]) -> PromptScores | None:
    """Return the scores of the prompt's tokens after the first; None if SGLang did not score all of them."""
    scored = meta.get("input_token_logprobs") or ()
    if len(scored) != meta["prompt_tokens"]:
        return None
    return PromptScores(
        logprobs=[float(entry[0]) for entry in scored[1:]],
        top=[_top_ids(entries) for entries in (meta.get("input_top_logprobs") or ())[1:]],
    )


def _top_ids(entries: Sequence[tuple[float, int, Any]] | None) -> TopIds:
    return TopIds(ids=[entry[1] for entry in entries or ()], logprobs=[float(entry[0]) for entry in entries or ()])
