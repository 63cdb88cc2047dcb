"""Describes a group as it was played and trained, in the form in which it is kept.

Arrays are base64 of little-endian values, in the order of the tokens. The policy's own tokens are those that it
sampled; a sequence's other tokens come from the environment.

Legend: N = own tokens of a step, sample by sample; S = own tokens of a sample or of one of its sequences; T = tokens of
a sequence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np

from penstock.records import Group, Sample, TextPart, TokenSequence
from services.trainer.backend.base import StepTokens
from services.trainer.data.rows.example import Example

TokenNames: TypeAlias = Callable[[np.ndarray], list[str]]
"""Returns the text of each token id, special tokens spelled."""

_PREVIEW_CHARS = 400
_NO_TOKEN: Final = b"\xff\xff\xff\xff"
"""Between sequences whose tokens are named together: no character is spelled across it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepColumns:
    """What a step computed of all its own tokens, sample by sample."""

    logprobs_N: np.ndarray
    """float32."""
    kept: Sequence[tuple[str, int, bytes]]
    """Of each column that is kept its name, the bytes of a value, and its little-endian values."""

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> "StepColumns":
        """Keep these arrays of shape [N], of which one is `logprobs`."""
        kept = [(name, array.itemsize, array.tobytes()) for name, array in arrays.items()]
        return cls(logprobs_N=arrays["logprobs"], kept=kept)

    def cut(self, start: int, stop: int) -> dict[str, bytes]:
        """Return the columns of the tokens from `start` to `stop`, by name."""
        return {name: values[size * start : size * stop] for name, size, values in self.kept}


class TrainedSample(NamedTuple):
    """What a step computed of a sample's own tokens, sequence by sequence."""

    columns: StepColumns
    start: int
    """Place of the sample's first token in the columns."""
    stop: int
    advantage: float
    """Mean over its tokens."""


def split_samples(tokens: StepTokens) -> dict[int, TrainedSample]:
    """Return the samples of a step by their numbers in the batch; those that were not computed are absent."""
    order = np.argsort(tokens.sample_N, kind="stable")
    sample_N = tokens.sample_N[order]
    arrays = {
        "logprobs": tokens.logprobs_N[order].astype("<f4", copy=False),
        "ratio": tokens.ratio_N[order].astype("<f4", copy=False),
        "correction": tokens.correction_N[order].astype("<f4", copy=False),
        "advantages": tokens.advantages_N[order].astype("<f4", copy=False),
        "trained": tokens.trained_N[order].astype("u1", copy=False),
    }
    if tokens.entropy_N is not None:
        arrays["entropy"] = tokens.entropy_N[order].astype("<f4", copy=False)
    starts = np.flatnonzero(np.diff(sample_N, prepend=-1))
    stops = np.append(starts[1:], len(order))
    advantages = np.add.reduceat(arrays["advantages"], starts, dtype=np.float64) / (stops - starts)
    columns = StepColumns.of(arrays)
    return {
        number: TrainedSample(columns=columns, start=start, stop=stop, advantage=advantage)
        for number, start, stop, advantage in zip(
            sample_N[starts].tolist(), starts.tolist(), stops.tolist(), advantages.tolist(), strict=True
        )
    }


class SequenceBytes:
    """A sequence's arrays as bytes, which are cut and compared in a fraction of the time that arrays take."""

    __slots__ = ("engine_logprobs", "own", "token_ids")

    def __init__(self, sequence: TokenSequence) -> None:
        """Copy the arrays of `sequence`, which are little-endian as those of all records."""
        self.token_ids = sequence.token_ids.tobytes()
        """int32[T]"""
        self.own = sequence.loss_mask.tobytes()
        """bool[T]"""
        first = self.own.find(1)
        if self.own.count(1) == len(self.own) - first:  # a single turn
            self.engine_logprobs = sequence.logprobs.tobytes()[4 * first :]
        else:
            self.engine_logprobs = sequence.logprobs[sequence.loss_mask].tobytes()
        """float32[S]: what the engine said of the policy's own tokens."""


def sequence_bytes(group: Group) -> list[list[SequenceBytes]]:
    """Return the arrays of each sample's sequences."""
    return [[SequenceBytes(sequence) for sequence in sample.sequences] for sample in group.samples]


def divergence(played: Sequence[Sequence[SequenceBytes]], trained: Mapping[int, TrainedSample]) -> float | None:
    """Return the largest difference of a log-probability between trainer and engine; None if nothing was computed.

    Args:
        played: `sequence_bytes` of a group.
        trained: What was computed of its samples, by their numbers in the group, in the order of the columns: a group's
            samples stand there side by side.
    """
    if not trained:
        return None
    samples = list(trained.values())
    logprobs = samples[0].columns.logprobs_N[samples[0].start : samples[-1].stop]
    engine = b"".join([arrays.engine_logprobs for number in trained for arrays in played[number]])
    return float(np.abs(logprobs - np.frombuffer(engine, dtype="<f4")).max())


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
    image_token_id: int | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the whole description and a short one for lists.

    Args:
        group: The group; it may have no samples.
        origin: Where its prompt comes from.
        fate: What became of it.
        trained: What a step computed of its samples, by their numbers in the group.
        names: Returns the text of each token.
        image_files: File names of images by content hash; those that are not kept are absent, and the description has
            their hashes.
        prompt_images: File names of the prompt's images, in order.
        image_token_id: The placeholder of an image; None if the model takes none.
    """
    played = sequence_bytes(group)
    sequences = [arrays for sample in played for arrays in sample]
    prompt_bytes = 4 * _common_prompt_length(sequences)
    prompt_ids = sequences[0].token_ids[:prompt_bytes] if sequences else b""
    prompt_texts, *texts = _name_all([prompt_ids, *(each.token_ids[prompt_bytes:] for each in sequences)], names)
    texts_of = iter(texts)
    placeholder = None if image_token_id is None else image_token_id.to_bytes(4, "little")
    versions = {
        span.policy_version for sample in group.samples for each in sample.sequences for span in each.version_spans
    }
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
    samples = []
    for number, sample in enumerate(group.samples):
        described = [
            _describe_sequence(sequence, arrays, prompt_bytes, next(texts_of), image_files, placeholder)
            for sequence, arrays in zip(sample.sequences, played[number], strict=True)
        ]
        samples.append(_describe_sample(sample, described, trained.get(number), played[number]))
    whole = common | {
        "messages": messages,
        "golds": [] if example is None else list(example.golds),
        "images": list(prompt_images),
        "prompt": {"token_ids": prompt_ids, "texts": prompt_texts},
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
        "num_tokens": [sum([len(arrays.engine_logprobs) for arrays in sample]) // 4 for sample in played],
        "num_turns": [len(sample.turns) for sample in group.samples],
        "versions": [min(versions), max(versions)] if versions else [],
        "dlogp_max": divergence(played, trained),
        "spans": [[sample.started_at, sample.elapsed_s, _replicas(sample)] for sample in group.samples],
    }
    return whole, short


def _describe_sample(
    sample: Sample,
    sequences: Sequence[dict[str, Any]],
    trained: TrainedSample | None,
    played: Sequence[SequenceBytes],
) -> dict[str, Any]:
    """Describe a sample; its described sequences get what the step computed of them."""
    if trained is not None:
        start = trained.start
        for described, arrays in zip(sequences, played, strict=True):
            stop = start + len(arrays.engine_logprobs) // 4
            described.update(trained.columns.cut(start, stop))
            start = stop
        assert start == trained.stop, "a step computes all own tokens of a sample or none"
    return {
        "reward": sample.reward,
        "advantage": None if trained is None else trained.advantage,
        "metrics": sample.metrics,
        "verdict": sample.verdict,
        "finish_reason": sample.finish_reason,
        "error": sample.error,
        "ended_by": sample.ended_by,
        "started_at": sample.started_at,
        "elapsed_s": sample.elapsed_s,
        "turns": sample.turns,
        "text": sample.text,
        "sequences": sequences,
    }


def _describe_sequence(
    sequence: TokenSequence,
    arrays: SequenceBytes,
    prompt_bytes: int,
    texts: Sequence[str],
    image_files: Mapping[str, str],
    placeholder: bytes | None,
) -> dict[str, Any]:
    """Describe the tokens behind the group's common prompt, whose ids have `prompt_bytes`.

    `placeholders` are the places among them of the last images, one each.
    """
    token_ids = arrays.token_ids[prompt_bytes:]
    places = []
    if placeholder is not None and placeholder in token_ids:
        places = np.flatnonzero(np.frombuffer(token_ids, dtype="<i4") == int.from_bytes(placeholder, "little")).tolist()
    return {
        "token_ids": token_ids,
        "texts": texts,
        "own": arrays.own[prompt_bytes // 4 :],
        "versions": sequence.version_spans,
        "engine_logprobs": arrays.engine_logprobs,
        "images": [image_files.get(sha256, sha256) for sha256 in sequence.images],
        "placeholders": places,
    }


def _name_all(sequences: Sequence[bytes], names: TokenNames) -> list[list[str]]:
    """Return the texts of each sequence's tokens. One call names all: it costs as much as some hundred tokens."""
    texts = names(np.frombuffer(_NO_TOKEN.join(sequences), dtype="<i4"))
    found, start = [], 0
    for ids in sequences:
        stop = start + len(ids) // 4
        found.append(texts[start:stop])
        start = stop + 1
    return found


def _common_prompt_length(sequences: Sequence[SequenceBytes]) -> int:
    """Return the leading tokens that all sequences share and that none of them sampled."""
    if not sequences:
        return 0
    length = min([each.own.find(1) for each in sequences])
    shared = sequences[0].token_ids[: 4 * length]
    others = [each.token_ids for each in sequences if not each.token_ids.startswith(shared)]
    first = np.frombuffer(shared, dtype="<i4")
    return min(
        [length, *(int((first != np.frombuffer(other, dtype="<i4", count=length)).argmax()) for other in others)]
    )


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


def _replicas(sample: Sample) -> list[str]:
    return list({turn.replica_id: None for turn in sample.turns})


def _preview(text: str) -> str:
    return text if len(text) <= _PREVIEW_CHARS else text[:_PREVIEW_CHARS] + "…"
