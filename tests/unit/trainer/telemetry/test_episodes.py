"""Episodes that are kept for people to read."""

import base64
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.bus.image_store import hash_of
from penstock.model.chat.chat_template import Renderer
from penstock.model.tokens import image_token_id
from services.trainer.backend.base import StepTokens
from services.trainer.telemetry.episodes.choice import Candidate, candidate, choose
from services.trainer.telemetry.episodes.log import EvaluatedRow, TrainedGroup
from tests.support.trainer.episode_logs import MODEL, PICTURE, Rows, group, index_of, open_log, whole
from tests.support.trainer.groups import make_group, num_placeholders, picture


def computed(groups: list[TrainedGroup], *, differences: Callable[[int], float] = lambda number: 0.0) -> StepTokens:
    """Tokens of the groups, of which each sample differs from the engine as it is told, in a mixed order of samples."""
    parts: list[tuple[int, np.ndarray]] = []
    for each in groups:
        for number in each.ready.numbers:
            (sequence,) = each.played.samples[number].sequences
            parts.append((len(parts), sequence.logprobs[sequence.loss_mask] + differences(len(parts))))
    parts = parts[1::2] + parts[::2]
    sample_N = np.concatenate([np.full(len(values), number) for number, values in parts])
    logprobs_N = np.concatenate([values for _, values in parts]).astype(np.float32)
    ones = np.ones(len(sample_N), dtype=np.float32)
    return StepTokens(
        sample_N=sample_N,
        logprobs_N=logprobs_N,
        ratio_N=ones,
        correction_N=ones,
        advantages_N=sample_N.astype(np.float32),
        trained_N=sample_N > 0,
        entropy_N=None,
    )


def floats(text: str) -> list[float]:
    """A column of numbers."""
    values: list[float] = np.frombuffer(base64.b64decode(text), dtype="<f4").tolist()
    return values


def test_every_token_of_a_trained_group_is_kept(tmp_path: Path) -> None:
    """With what engine and trainer said of it, in the order of the tokens, whatever order they were computed in."""
    groups = [group(0), group(1)]
    log = open_log(tmp_path, keep="all")
    log.keep_trained(1, 4, groups, computed(groups, differences=lambda number: number / 8))
    log.close()
    entries = index_of(tmp_path)
    assert [(entry["index"], entry["outcome"], entry["step"], entry["row"]) for entry in entries] == [
        (0, "trained", 1, 0),
        (1, "trained", 1, 1),
    ]
    kept = whole(tmp_path, entries[1])
    assert kept["messages"] == [{"role": "user", "content": "problem 1"}]
    assert [(tmp_path / "episodes" / "images" / name).read_bytes() for name in kept["images"]] == [PICTURE]
    assert {*kept["images"], *kept["samples"][0]["sequences"][0]["images"]} <= {*entries[1]["image_files"]}
    for number, sample in enumerate(kept["samples"]):
        (sequence,) = sample["sequences"]
        (played,) = groups[1].played.samples[number].sequences
        own = played.logprobs[played.loss_mask]
        assert len(kept["prompt"]["texts"]) + len(sequence["texts"]) == len(played.token_ids)
        assert floats(sequence["engine_logprobs"]) == pytest.approx(own.tolist())
        if number == 3:  # it was dropped before training
            assert "logprobs" not in sequence
            assert sample["advantage"] is None
        else:
            assert floats(sequence["logprobs"]) == pytest.approx((own + (3 + number) / 8).tolist())
            assert sample["advantage"] == 3 + number
    assert entries[1]["dlogp_max"] == pytest.approx(5 / 8)


def test_a_sample_of_several_sequences_has_the_tokens_of_each(tmp_path: Path) -> None:
    """Columns follow the sequences; the next sample's begin behind the last of them."""
    each = group(0)
    parts = [
        tuple(group(index).played.samples[number].sequences[0] for index in range(2))
        for number in range(len(each.played.samples))
    ]
    samples = tuple(
        msgspec.structs.replace(sample, sequences=sequences)
        for sample, sequences in zip(each.played.samples, parts, strict=True)
    )
    each = replace(each, played=msgspec.structs.replace(each.played, samples=samples))
    sample_N = np.repeat([0, 1, 2], [sample.num_own_tokens for sample in samples[:3]])
    column = np.arange(len(sample_N), dtype=np.float32)
    tokens = StepTokens(
        sample_N=sample_N,
        logprobs_N=column,
        ratio_N=column + 1,
        correction_N=column + 2,
        advantages_N=column + 3,
        trained_N=column > 4,
        entropy_N=column + 5,
    )
    log = open_log(tmp_path, keep="all")
    log.keep_trained(1, 4, [each], tokens)
    log.close()
    [entry] = index_of(tmp_path)
    described = [sequence for sample in whole(tmp_path, entry)["samples"][:3] for sequence in sample["sequences"]]
    for place, name in enumerate(("logprobs", "ratio", "correction", "advantages", "trained", "entropy")):
        if name != "trained":
            found = [value for sequence in described for value in floats(sequence[name])]
            assert found == [value + place for value in range(len(column))]
    lengths = [len(floats(sequence["logprobs"])) for sequence in described]
    assert lengths == [sequence.num_own_tokens for sequences in parts[:3] for sequence in sequences]
    assert b"".join(base64.b64decode(sequence["trained"]) for sequence in described) == bytes(column > 4)
    engine = [value for sequence in described for value in floats(sequence["engine_logprobs"])]
    assert entry["dlogp_max"] == pytest.approx(max(abs(value - said) for value, said in enumerate(engine)))


def test_no_character_is_spelled_across_samples(tmp_path: Path) -> None:
    """One ends in half a character, as a cut sample may, and the next begins with the other half."""
    halves = Renderer.load(MODEL).render_text("é")
    assert len(halves) == 2
    played = make_group(MODEL, index=0, rewards=[1.0, 0.0], own_lengths=[1, 1], version=3)
    samples = []
    for sample, half in zip(played.samples, halves, strict=True):
        (sequence,) = sample.sequences
        token_ids = np.append(sequence.token_ids[:-1], np.int32(half))
        samples.append(
            msgspec.structs.replace(sample, sequences=(msgspec.structs.replace(sequence, token_ids=token_ids),))
        )
    log = open_log(tmp_path, keep="all")
    log.keep_left_out("stale", "old", msgspec.structs.replace(played, samples=tuple(samples)))
    log.close()
    [entry] = index_of(tmp_path)
    texts = [sequence["texts"] for sample in whole(tmp_path, entry)["samples"] for sequence in sample["sequences"]]
    assert texts == [["\ufffd"], ["\ufffd"]]


def test_the_advantage_of_a_sample_is_that_of_its_tokens(tmp_path: Path) -> None:
    """Not a rounded mean of them, however many there are."""
    each = group(0, own_lengths=[1000, 7, 5, 3])
    tokens = computed([each])
    advantages_N = np.full(len(tokens.sample_N), 1.3, dtype=np.float32)
    log = open_log(tmp_path, keep="all")
    log.keep_trained(1, 4, [each], replace(tokens, advantages_N=advantages_N))
    log.close()
    [entry] = index_of(tmp_path)
    assert entry["advantages"] == [float(np.float32(1.3))] * 3 + [None]


def test_what_was_left_out_is_kept_with_the_reason(tmp_path: Path) -> None:
    """The first two of each kind, for the step that is taken next; all with `keep = "all"`."""
    for keep, number in (("few", 2), ("all", 5)):
        log = open_log(tmp_path / keep, step=6, keep=keep)
        for index in range(5):
            log.keep_left_out("stale", "2 versions old, 1 allowed", group(index).played)
        log.keep_left_out("filtered", "equal_rewards", group(9).played)
        log.close()
        entries = index_of(tmp_path / keep)
        assert [entry["step"] for entry in entries] == [7] * (number + 1)
        assert [entry["reason"] for entry in entries][-2:] == ["2 versions old, 1 allowed", "equal_rewards"]


def test_a_picture_that_is_not_kept_is_known_by_its_hash(tmp_path: Path) -> None:
    """Those that an environment added to a filtered or failed group are not fetched; the row's own are there."""
    images = [PICTURE, picture(1)]
    played = make_group(MODEL, index=0, images=images, placeholders=[num_placeholders((96, 96))] * 2, version=3)
    log = open_log(tmp_path, keep="all")
    log.keep_left_out("filtered", "equal_rewards", played)
    log.close()
    [entry] = index_of(tmp_path)
    shown, added = map(hash_of, images)
    for sample in whole(tmp_path, entry)["samples"]:
        assert [each["images"] for each in sample["sequences"]] == [[f"{shown}.png", added]]
    assert entry["image_files"] == [f"{shown}.png"]


def test_the_places_of_pictures_that_an_environment_showed_are_kept(tmp_path: Path) -> None:
    """Among the tokens behind the group's common prompt, which has the row's own picture."""
    shape: dict[str, Any] = {"images": [PICTURE], "placeholders": [num_placeholders((96, 96))], "own_lengths": (2, 3)}
    played = make_group(MODEL, index=0, rewards=(1.0, 0.0), version=3, **shape)
    seen = np.array([9, image_token_id(MODEL), 9, image_token_id(MODEL)], dtype=np.int32)
    samples = []
    for sample in played.samples:
        (sequence,) = sample.sequences
        longer = msgspec.structs.replace(
            sequence,
            token_ids=np.concatenate([sequence.token_ids, seen]),
            loss_mask=np.append(sequence.loss_mask, [False] * len(seen)),
            logprobs=np.append(sequence.logprobs, np.zeros(len(seen), dtype=np.float32)),
            images=(*sequence.images, *map(hash_of, (picture(1), picture(2)))),
        )
        samples.append(msgspec.structs.replace(sample, sequences=(longer,)))
    log = open_log(tmp_path, keep="all")
    log.keep_left_out("filtered", "equal_rewards", msgspec.structs.replace(played, samples=tuple(samples)))
    log.close()
    described = [each["sequences"][0] for each in whole(tmp_path, index_of(tmp_path)[0])["samples"]]
    assert [each["placeholders"] for each in described] == [[2 + 1, 2 + 3], [3 + 1, 3 + 3]]
    assert [each["images"][1:] for each in described] == [[hash_of(picture(1)), hash_of(picture(2))]] * 2


def test_why_a_sample_ended_early_is_kept(tmp_path: Path) -> None:
    """Beside how."""
    played, reason = group(0).played, "3 images, but max_images leaves room for 2"
    cut = msgspec.structs.replace(played.samples[0], finish_reason="length", ended_by=reason)
    log = open_log(tmp_path, keep="all")
    log.keep_left_out("stale", "old", msgspec.structs.replace(played, samples=(cut, *played.samples[1:])))
    log.close()
    [entry] = index_of(tmp_path)
    assert [sample["ended_by"] for sample in whole(tmp_path, entry)["samples"]] == [reason, "", "", ""]


def evaluated_row(row: int) -> EvaluatedRow:
    """A row of an evaluation set of 80 rows."""
    return EvaluatedRow(set_name="held_out", row=row, num_rows=80, read=Rows().__getitem__)


def test_a_group_of_an_evaluation_is_kept_with_its_row(tmp_path: Path) -> None:
    """With set and row instead of a row of the data, the weights' step and version, and no column of the trainer."""
    log = open_log(tmp_path, keep="all")
    played = group(5)
    assert log.why_keep_evaluated(20, evaluated_row(7), played.played, pass_score=1.0) == ""
    log.keep_evaluated("", 20, 21, evaluated_row(7), played.played, played.images)
    log.close()
    (entry,) = index_of(tmp_path)
    assert (entry["outcome"], entry["step"], entry["version"]) == ("evaluated", 20, 21)
    assert (entry["source"], entry["row"], entry["dlogp_max"]) == ("eval/held_out", 7, None)
    kept = whole(tmp_path, entry)
    assert kept["messages"] == [{"role": "user", "content": "problem 7"}]
    assert all((tmp_path / "episodes" / "images" / name).exists() for name in kept["images"])
    assert "logprobs" not in kept["samples"][0]["sequences"][0]


def test_a_run_that_starts_over_keeps_nothing_of_the_start_before(tmp_path: Path) -> None:
    """The weights of step 0 may be others now; with a checkpoint of step 0 they are the same."""
    for is_resumed in (True, False):
        log = open_log(tmp_path, keep="all")
        log.keep_evaluated("", 0, 1, evaluated_row(7), group(5).played, {})
        log.close()
        open_log(tmp_path, is_resumed=is_resumed).close()
        assert len(index_of(tmp_path)) == is_resumed


def test_of_an_evaluation_few_are_kept(tmp_path: Path) -> None:
    """The same eight rows every time, and of the others the first two wrong and the first two broken ones."""
    log = open_log(tmp_path, keep="few")
    wrong, right = group(0, rewards=[0.0, 0.5]).played, group(0, rewards=[0.0, 1.0]).played
    broken = msgspec.structs.replace(right, samples=(), error="no environment")
    for step in (20, 40):
        reasons = {
            row: log.why_keep_evaluated(
                step, evaluated_row(row), {1: wrong, 2: broken}.get(row % 3, right), pass_score=1.0
            )
            for row in range(80)
        }
        assert {row: reason for row, reason in reasons.items() if reason is not None} == {
            **dict.fromkeys(range(0, 80, 10), "in every evaluation"),
            **dict.fromkeys((1, 4), "wrong"),
            **dict.fromkeys((2, 5), "cut off or failed"),
        }
    log.close()


def test_few_are_chosen_by_what_people_look_for() -> None:
    """A group can be chosen for several reasons."""

    def each(reward: float, *, oldest: int = 5, divergence: float = 0.0, is_broken: bool = False) -> Candidate:
        return Candidate(
            reward=reward,
            lowest=(reward, reward),
            oldest_version=oldest,
            divergence=divergence,
            is_broken=is_broken,
        )

    batch = [each(0.5), each(1.0, oldest=4), each(0.0), each(0.5, divergence=1.0), each(0.5, is_broken=True), each(0.5)]
    assert choose(batch, step=5) == {
        1: ["best", "oldest"],
        2: ["worst"],
        3: ["most diverged"],
        4: ["cut off or failed"],
        5: ["in turn"],
    }


def test_the_worst_sample_of_a_step_is_kept() -> None:
    """Also in a group whose mean is not the lowest; the mean decides between groups whose worst samples are equal."""
    of_each = ([0.5, 0.5], [1.0, 0.0, 1.0], [1.0, 0.0, 0.5], [1.0, 1.0])
    candidates = [candidate(group(index, rewards=rewards).played, None) for index, rewards in enumerate(of_each)]
    assert choose(candidates, step=3) == {0: ["oldest"], 2: ["worst"], 3: ["best", "in turn"]}


def test_a_run_that_goes_on_keeps_what_its_checkpoint_has_seen(tmp_path: Path) -> None:
    """Later steps are taken again, and what a crash cut off is no line."""
    log = open_log(tmp_path, keep="all")
    for step in (1, 2, 3):
        log.keep_trained(step, step, [group(step)], None)
    log.close()
    index = tmp_path / "episodes" / "index.jsonl"
    index.write_bytes(index.read_bytes()[:-7])
    again = open_log(tmp_path, step=1, keep="all")
    again.keep_trained(2, 2, [group(7)], None)
    again.close()
    assert [(entry["step"], entry["index"]) for entry in index_of(tmp_path)] == [(1, 1), (2, 7)]
    assert [whole(tmp_path, entry)["index"] for entry in index_of(tmp_path)] == [1, 7]
    assert sorted(path.name for path in (tmp_path / "episodes" / "discarded").iterdir()) == [
        "step-000002.jsonl",
        "step-000003.jsonl",
    ]


def test_the_groups_of_a_step_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones: each of both files is opened once. Long ones go in portions, in their order."""
    log, opened, open_file = open_log(tmp_path, keep="all"), list[str](), os.open

    def note(path: Any, *rest: Any, **more: Any) -> int:
        opened.append(os.path.basename(path))
        return open_file(path, *rest, **more)

    with monkeypatch.context() as counting:
        counting.setattr(os, "open", note)
        log.keep_trained(1, 1, [group(index) for index in range(4)], None)
        log.close()
    assert [name for name in opened if name.endswith(".jsonl")] == ["step-000001.jsonl", "index.jsonl"]
    monkeypatch.setattr("services.trainer.telemetry.episodes.log._PORTION_BYTES", 1)
    log = open_log(tmp_path, step=1, keep="all")
    log.keep_trained(2, 2, [group(index) for index in range(4, 7)], None)
    log.close()
    assert [entry["index"] for entry in index_of(tmp_path)] == [*range(7)]
    assert [whole(tmp_path, entry)["index"] for entry in index_of(tmp_path)] == [*range(7)]
