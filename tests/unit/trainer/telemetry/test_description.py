"""What is written of a group says which tokens its samples share and what engine and trainer said of each."""

from base64 import b64decode
from typing import Any

import msgspec
import numpy as np

from penstock.records import Group, GroupId, Sample, TokenSequence, VersionSpan
from services.trainer.backend.base import StepTokens
from services.trainer.telemetry.episodes.description import Fate, Origin, describe_group, split_samples

_FATE = Fate(outcome="trained", reason="", step=1, version=1, time="2026-01-01T00:00:00.000+00:00")


def _sample(token_ids: list[int], own: list[int]) -> Sample:
    """Return a sample whose engine gave the token at place n the log-probability -n."""
    mask = np.isin(np.arange(len(token_ids)), own)
    sequence = TokenSequence(
        token_ids=np.array(token_ids, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -np.arange(len(token_ids)), 0).astype(np.float32),
        version_spans=(VersionSpan(num_tokens=len(own), policy_version=1),),
        images=(),
        num_prompt_tokens=own[0],
        num_last_turn_tokens=1,
    )
    return Sample(sequences=(sequence,), reward=1.0, finish_reason="stop", verdict=None, turns=(), text="")


def _describe(*samples: Sample, logprobs: list[float]) -> dict[str, Any]:
    """Return the description as it is read, after a step that found `logprobs` for the own tokens."""
    group = Group(
        id=GroupId(run_id="run", index=0, attempt=0, trainer_epoch="e"),
        num_samples=len(samples),
        samples=samples,
        worker_id="w",
    )
    column = np.array(logprobs, dtype=np.float32)
    tokens = StepTokens(
        sample_N=np.repeat(np.arange(len(samples)), [sample.num_own_tokens for sample in samples]),
        logprobs_N=column,
        ratio_N=column,
        correction_N=column,
        advantages_N=column,
        trained_N=column < 0,
        entropy_N=None,
    )
    whole, short = describe_group(
        group,
        Origin(source="", row=0, example=None),
        _FATE,
        split_samples(tokens),
        names=lambda ids: [str(token) for token in ids.tolist()],
        image_files={},
        prompt_images=[],
    )
    read: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(whole | {"dlogp_max": short["dlogp_max"]}))
    return read


def _values(text: str, dtype: str) -> list[float]:
    values: list[float] = np.frombuffer(b64decode(text), dtype=dtype).tolist()
    return values


def test_an_environments_tokens_between_turns_have_no_log_probability() -> None:
    """Both columns have one value for each own token, also where the environment spoke between two turns."""
    played = _sample([5, 6, 7, 8, 9, 10], own=[2, 3, 5])
    described = _describe(played, logprobs=[-2.5, -3.0, -7.0])
    (sequence,) = described["samples"][0]["sequences"]
    assert _values(sequence["own"], "u1") == [1, 1, 0, 1]
    assert _values(sequence["engine_logprobs"], "<f4") == [-2, -3, -5]
    assert _values(sequence["logprobs"], "<f4") == [-2.5, -3, -7]
    assert described["dlogp_max"] == 2


def test_the_prompt_ends_where_samples_differ() -> None:
    """A player may begin samples of a group differently: tokens that differ belong to the samples."""
    described = _describe(_sample([1, 2, 3, 4], own=[3]), _sample([1, 9, 3, 4], own=[3]), logprobs=[-3, -3])
    assert (_values(described["prompt"]["token_ids"], "<i4"), described["prompt"]["texts"]) == ([1], ["1"])
    first, second = (sample["sequences"][0] for sample in described["samples"])
    assert (first["texts"], second["texts"]) == (["2", "3", "4"], ["9", "3", "4"])
    assert _values(second["own"], "u1") == [0, 0, 1]
