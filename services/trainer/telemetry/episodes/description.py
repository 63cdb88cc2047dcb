"""Describes a group as it was played and trained, in the form in which it is kept.

Arrays are base64 of little-endian values, in the order of the tokens. The policy's own tokens are those that it
sampled; a sequence's other tokens come from the environment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np

from penstock.records import Group, Sample, TextPart, TokenSequence
from services.trainer.backend.base import StepTokens
from services.trainer.data.rows.example import Example

TokenNames: TypeAlias = Callable[[Sequence[int]], list[str]]
"""Returns the text of each token id, special tokens spelled."""

_PREVIEW_CHARS = 400


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedSample:
    """What a step computed of a sample's own tokens, sequence by sequence."""

    logprobs_S: np.ndarray
    ratio_S: np.ndarray
    correction_S: np.ndarray
    advantages_S: np.ndarray
    trained_S: np.ndarray
    entropy_S: np.ndarray | None


def split_samples(tokens: StepTokens) -> dict[int, TrainedSample]:
    """Return the samples of a step by their numbers in the batch; those that were not computed are absent."""
    order = np.argsort(tokens.sample_N, kind="stable")
    numbers, starts = np.unique(tokens.sample_N[order], return_index=True)
    found = {}
    for number, places in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
        found[number] = TrainedSample(
            logprobs_S=tokens.logprobs_N[places],
            ratio_S=tokens.ratio_N[places],
            correction_S=tokens.correction_N[places],
            advantages_S=tokens.advantages_N[places],
            trained_S=tokens.trained_N[places],
            entropy_S=None if tokens.entropy_N is None else tokens.entropy_N[places],
        )
    return found


def divergence(group: Group, trained: Mapping[int, TrainedSample]) -> float | None:
    """Return the largest difference of a log-probability between trainer and engine; None if nothing was computed.

    Args:
        group: The group as it was played.
        trained: What was computed of its samples, by their numbers in the group.
    """
    differences = [
        float(np.abs(each.logprobs_S - _engine_logprobs(group.samples[number])).max())
        for number, each in trained.items()
    ]
    return max(differences, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a group's prompt comes from."""

    source: str
    """Name of the source of data; empty if there is only one. `eval/<set>` for a row of an evaluation set."""
    row: int
    example: Example | None
    """None if the row can no longer be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What became of a group."""

    outcome: str
    """trained, stale, filtered, failed or evaluated."""
    reason: str
    """Why it was left out; of a trained or evaluated group, why it is kept."""
    step: int
    """The step that trained it, or the next one when it was dropped. Of an evaluated group, its weights' steps."""
    version: int
    """The policy version before that step; of an evaluated group, the version that played it."""
    time: str
    """UTC, ISO 8601."""


def describe_group(
    group: Group,
    origin: Origin,
    fate: Fate,
    trained: Mapping[int, TrainedSample],
    *,
    names: TokenNames,
    image_files: Mapping[str, str],
    prompt_images: Sequence[str],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the whole description and a short one for lists.

    Args:
        group: The group; it may have no samples.
        origin: Where its prompt comes from.
        fate: What became of it.
        trained: What a step computed of its samples, by their numbers in the group.
        names: Returns the text of each token.
        image_files: File names of images by content hash; those that were not kept are absent.
        prompt_images: File names of the prompt's images, in order.
    """
    sequences = [sequence for sample in group.samples for sequence in sample.sequences]
    prompt_length = _common_prompt_length(sequences)
    prompt_ids = sequences[0].token_ids[:prompt_length] if sequences else np.zeros(0, dtype=np.int32)
    example = origin.example
    messages = [] if example is None else _messages(example)
    common = {
        "group": group.id.group,
        "index": group.id.index,
        "attempt": group.id.attempt,
        "outcome": fate.outcome,
        "reason": fate.reason,
        "error": group.error,
        "step": fate.step,
        "version": fate.version,
        "time": fate.time,
        "source": origin.source,
        "row": origin.row,
        "environment": group.environment,
        "worker": group.worker_id,
    }
    samples = [
        _describe_sample(sample, trained.get(number), prompt_length, names, image_files)
        for number, sample in enumerate(group.samples)
    ]
    whole = common | {
        "messages": messages,
        "golds": [] if example is None else list(example.golds),
        "images": list(prompt_images),
        "prompt": {"token_ids": _bytes(prompt_ids, "<i4"), "texts": names(prompt_ids.tolist())},
        "samples": samples,
    }
    short = common | {
        "golds": whole["golds"],
        "num_images": len(prompt_images),
        "prompt": _preview("\n".join(message["content"] for message in messages)),
        "texts": [_preview(sample.text) for sample in group.samples],
        "rewards": [sample.reward for sample in group.samples],
        "advantages": [sample["advantage"] for sample in samples],
        "finish": [sample.finish_reason for sample in group.samples],
        "statuses": ["" if sample.verdict is None else sample.verdict.status for sample in group.samples],
        "num_tokens": [sample.num_own_tokens for sample in group.samples],
        "num_turns": [len(sample.turns) for sample in group.samples],
        "versions": [group.oldest_version, group.newest_version] if group.samples else [],
        "dlogp_max": divergence(group, trained),
        "spans": [[sample.started_at, sample.elapsed_s, _replicas(sample)] for sample in group.samples],
    }
    return whole, short


def _describe_sample(
    sample: Sample,
    trained: TrainedSample | None,
    prompt_length: int,
    names: TokenNames,
    image_files: Mapping[str, str],
) -> dict[str, Any]:
    sequences, start = [], 0
    for sequence in sample.sequences:
        stop = start + sequence.num_own_tokens
        sequences.append(_describe_sequence(sequence, trained, start, stop, prompt_length, names, image_files))
        start = stop
    return {
        "reward": sample.reward,
        "advantage": None if trained is None else float(trained.advantages_S.mean()),
        "metrics": sample.metrics,
        "verdict": None if sample.verdict is None else msgspec.to_builtins(sample.verdict),
        "finish_reason": sample.finish_reason,
        "error": sample.error,
        "ended_by": sample.ended_by,
        "started_at": sample.started_at,
        "elapsed_s": sample.elapsed_s,
        "turns": msgspec.to_builtins(sample.turns),
        "text": sample.text,
        "sequences": sequences,
    }


def _describe_sequence(
    sequence: TokenSequence,
    trained: TrainedSample | None,
    start: int,
    stop: int,
    prompt_length: int,
    names: TokenNames,
    image_files: Mapping[str, str],
) -> dict[str, Any]:
    """Describe the tokens behind the group's common prompt; `start` and `stop` are of its own tokens in the sample."""
    ids = sequence.token_ids[prompt_length:]
    own = sequence.loss_mask[prompt_length:]
    described: dict[str, Any] = {
        "token_ids": _bytes(ids, "<i4"),
        "texts": names(ids.tolist()),
        "own": _bytes(own, "u1"),
        "versions": [[span.num_tokens, span.policy_version] for span in sequence.version_spans],
        "engine_logprobs": _bytes(sequence.logprobs[sequence.loss_mask], "<f4"),
        "images": [image_files.get(sha256, "") for sha256 in sequence.images],
    }
    if trained is not None:
        described |= {
            "logprobs": _bytes(trained.logprobs_S[start:stop], "<f4"),
            "ratio": _bytes(trained.ratio_S[start:stop], "<f4"),
            "correction": _bytes(trained.correction_S[start:stop], "<f4"),
            "advantages": _bytes(trained.advantages_S[start:stop], "<f4"),
            "trained": _bytes(trained.trained_S[start:stop], "u1"),
        }
        if trained.entropy_S is not None:
            described["entropy"] = _bytes(trained.entropy_S[start:stop], "<f4")
    return described


def _common_prompt_length(sequences: Sequence[TokenSequence]) -> int:
    """Return the leading tokens that all sequences share and that none of them sampled."""
    if not sequences:
        return 0
    shortest = min(int(np.argmax(sequence.loss_mask)) for sequence in sequences)
    first = sequences[0].token_ids[:shortest]
    for sequence in sequences[1:]:
        differs = np.flatnonzero(first != sequence.token_ids[: len(first)])
        first = first[: int(differs[0])] if len(differs) else first
    return len(first)


def _messages(example: Example) -> list[dict[str, Any]]:
    return [
        {
            "role": message.role,
            "content": "".join(
                part.text if isinstance(part, TextPart) else f"<image-{part.index}>" for part in message.parts
            ),
            **(
                {"tool_calls": [msgspec.to_builtins(call) for call in message.tool_calls]} if message.tool_calls else {}
            ),
        }
        for message in example.messages
    ]


def _engine_logprobs(sample: Sample) -> np.ndarray:
    return np.concatenate([sequence.logprobs[sequence.loss_mask] for sequence in sample.sequences])


def _replicas(sample: Sample) -> list[str]:
    return list(dict.fromkeys(turn.replica_id for turn in sample.turns))


def _preview(text: str) -> str:
    return text if len(text) <= _PREVIEW_CHARS else text[:_PREVIEW_CHARS] + "…"


def _bytes(values: np.ndarray, dtype: str) -> bytes:
    return values.astype(dtype).tobytes()
