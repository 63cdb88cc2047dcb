"""Replay: the recorded steps of a real run come out the same, and other settings show what they would have done."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from bench.trainer.padded import PaddedPolicy
from penstock.errors import ConfigError, SetupError
from penstock.model.tokens import forbidden_token_ids
from services.cli.replay.run import replay
from services.trainer.admission.filters import screen
from services.trainer.algorithm.advantage import sample_advantages
from services.trainer.algorithm.axes import AdvantageConfig
from services.trainer.algorithm.presets import PRESETS
from services.trainer.backend.environment import computing_threads, current_environment
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.batching.sequences import open_reader
from services.trainer.replay.comparison import Line, compare, verdict
from services.trainer.replay.recorder import StepRecorder
from services.trainer.replay.recording import read_recording, recorded_steps, write_recording
from services.trainer.replay.replay import ReplayedStep, replay_step, start_of
from services.trainer.replay.run import RecordedRun, opened_run
from tests.conftest import ROOT
from tests.support.trainer.runs.recorded_run import MODEL, NUM_STEPS, RECORDED, copied, lines_of, replayed


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    """A copy of the recorded run, to change."""
    return copied(tmp_path)


@pytest.mark.parametrize("step", range(1, NUM_STEPS + 1))
def test_a_recorded_step_is_reproduced(step: int, tmp_path: Path) -> None:
    """To the bit where libraries and processor are those of the recording; elsewhere within rounding errors.

    Bits depend on what `Environment` lists: versions of torch and of what decodes and cuts images, the processor and
    the instruction set, and the number of threads, which a replay sets itself.
    """
    run = RecordedRun(RECORDED)
    again, logged = replayed(run, step, tmp_path), run.metrics(step)
    assert again.metrics["loss"] == pytest.approx(logged["loss"], rel=1e-5, abs=1e-7)
    assert again.metrics["grad_norm"] == pytest.approx(logged["grad_norm"], rel=1e-5)
    inputs = run.recording(step).inputs
    if again.environment == inputs.environment:
        lines = compare(inputs, logged, again)
        assert [line for line in lines if line.agrees is not True] == []
        assert verdict(lines) is True


@pytest.mark.parametrize("name", ["step_time_s", "trained_tokens_per_s", "tflops_per_rank", "rank_imbalance"])
def test_how_fast_and_evenly_a_step_was_computed_is_not_compared(name: str, tmp_path: Path) -> None:
    """The machine and its ranks decide that, not the step."""
    run = RecordedRun(RECORDED)
    again = replayed(run, 1, tmp_path)
    assert name in again.metrics
    lines = compare(run.recording(1).inputs, {**run.metrics(1), name: 1e9}, again)
    assert name not in {line.name for line in lines}


def test_group_rows_have_the_logprobs_of_the_engine_that_sampled(tmp_path: Path) -> None:
    """On the step whose tokens are of the very weights; the model is confident, so a misplaced token would show."""
    metrics = replayed(RecordedRun(RECORDED), 1, tmp_path).metrics
    assert metrics["token_lag_max"] == 0
    assert metrics["entropy"] < np.log(384) / 2
    assert metrics["dlogp_max"] < 1e-5


def test_a_recorded_step_is_that_of_padded_rows(tmp_path: Path) -> None:
    """Group rows against samples padded by transformers: loss and gradient norm agree within a millionth.

    The loss is a sum of terms of either sign that nearly cancel, so it is compared on the scale of its terms.
    """
    run = RecordedRun(RECORDED)
    start, recording = start_of(run, 2, model_path=MODEL, scratch=tmp_path), run.recording(2)
    again = replay_step(start, recording, recording.settings)
    assert again.metrics["shared_token_fraction"] > 0.5

    groups = [open_reader(MODEL).read(group, recording.images) for group in recording.groups]
    sequences = [sequence for group in groups for sequence in group.sequences]
    counts = np.array([sequence.num_own_tokens for sequence in sequences])
    rewards = np.array([reward for group in groups for reward in group.rewards])
    group_of = np.repeat(np.arange(len(groups)), [len(group.sequences) for group in groups])
    advantages_N = torch.from_numpy(
        sample_advantages(rewards, group_of, counts, AdvantageConfig()).repeat(counts)
    ).float()
    engine_N = torch.from_numpy(np.concatenate([s.engine_logprobs_X[s.loss_mask_X] for s in sequences]))

    policy = PaddedPolicy.load(start.model_path, temperature=1.0, forbidden_ids=forbidden_token_ids(MODEL))
    logprobs_N = policy.logprobs(sequences)
    terms_N = -advantages_N * (logprobs_N.detach() - engine_N).exp().clamp(max=2.0) / len(engine_N)
    (terms_N * logprobs_N).sum().backward()
    grad_norm = torch.stack([p.grad.norm() for p in policy.model.parameters() if p.grad is not None]).norm()
    assert float(grad_norm) == pytest.approx(again.metrics["grad_norm"], rel=1e-6)
    assert float(terms_N.sum()) == pytest.approx(again.metrics["loss"], abs=1e-6 * float(terms_N.abs().sum()))


@pytest.mark.slow
def test_a_kept_checkpoint_gives_the_step_that_training_up_to_it_gives(run: RecordedRun, tmp_path: Path) -> None:
    """From the checkpoint of step 2, or from the base model through steps 1 and 2: the same third step, to the bit."""
    through_steps = replayed(run, 3, tmp_path)
    start = start_of(run, 3, model_path=MODEL, scratch=tmp_path / "before")
    shutil.copytree(start.path, run.path / "checkpoints" / start.path.name)
    shutil.rmtree(run.groups / "step-000001")
    from_checkpoint = replayed(run, 3, tmp_path / "none")
    assert from_checkpoint.weights_before == through_steps.weights_before
    assert from_checkpoint.weights_after == through_steps.weights_after
    assert from_checkpoint.metrics["loss"] == through_steps.metrics["loss"]
    assert from_checkpoint.metrics["grad_norm"] == through_steps.metrics["grad_norm"]


def test_other_settings_show_what_they_would_have_done(tmp_path: Path) -> None:
    """Another cap, loss, clip or learning rate changes what it is meant to change, and nothing else."""
    run = RecordedRun(RECORDED)
    start = start_of(run, 2, model_path=MODEL, scratch=tmp_path)
    recording = run.recording(2)

    def with_settings(*overrides: str) -> ReplayedStep:
        return replay_step(start, recording, run.recording(2, overrides).settings)

    recorded = with_settings()
    capped = with_settings("--algorithm.correction.high=1.0")
    assert recorded.metrics["tis_capped_fraction"] == 0
    assert capped.metrics["tis_capped_fraction"] > 0
    assert capped.metrics["tis_mean"] < recorded.metrics["tis_mean"]
    assert capped.metrics["loss"] != recorded.metrics["loss"]
    direct = with_settings("--algorithm.trust_region.clip_high=0.0", "--algorithm.preset=ppo")
    assert direct.metrics["clip_fraction"] > 0
    assert "tis_mean" not in direct.metrics
    clipped = with_settings("--trainer.optimizer.grad_clip=0.01")
    assert clipped.metrics["loss"] == recorded.metrics["loss"]
    assert clipped.weights_after != recorded.weights_after
    slow = with_settings("--trainer.optimizer.learning_rate=1e-9")
    assert slow.metrics["learning_rate"] < recorded.metrics["learning_rate"]
    assert slow.weights_after != recorded.weights_after
    cut = with_settings("--trainer.micro_batch_tokens=1")
    assert cut.metrics["loss"] == pytest.approx(recorded.metrics["loss"], abs=1e-6)
    assert all(step.weights_before == recorded.weights_before for step in (capped, direct, clipped, slow, cut))


@pytest.mark.slow
def test_any_algorithm_can_be_replayed(run: RecordedRun, tmp_path: Path) -> None:
    """Every preset takes a step from the same weights, and settings beside a preset lie over it.

    In this step no weight reaches a bound, and all samples have five tokens: two presets take the recorded step.
    """
    start = start_of(run, 2, model_path=MODEL, scratch=tmp_path)
    recording = run.recording(2)

    def under(*overrides: str) -> ReplayedStep:
        return replay_step(start, recording, run.recording(2, overrides).settings)

    steps = {preset: under(f"--algorithm.preset={preset}") for preset in PRESETS}
    recorded = run.metrics(2)
    assert {name for name, step in steps.items() if step.weights_after == steps["tis"].weights_after} == {
        "tis",
        "icepop",
        "rlinf_geo3k",
    }
    assert {step.weights_before for step in steps.values()} == {recording.inputs.weights}
    assert steps["tis"].metrics["loss"] == pytest.approx(recorded["loss"], rel=1e-5, abs=1e-7)
    assert all(step.metrics["skipped"] == 0 and step.metrics["grad_norm"] > 0 for step in steps.values())
    assert steps["gspo"].metrics["clip_fraction"] > steps["dapo"].metrics["clip_fraction"]
    sharp = under("--algorithm.preset=dppo", "--algorithm.drift=10")
    assert sharp.metrics["drift_loss"] == pytest.approx(1e4 * steps["dppo"].metrics["drift_loss"], rel=1e-6)
    with pytest.raises(ConfigError, match=r"needs a reference policy, but .* was saved without one"):
        under("--algorithm.kl.kind=k3")


def test_a_stricter_bound_leaves_stale_groups_out(tmp_path: Path) -> None:
    """Step 2 trained groups of version 1 only: with max_staleness 0 nothing is left, and that is said."""
    with pytest.raises(SetupError, match=r"trainer\.max_staleness = 0 leaves none of the 8 groups"):
        replayed(RecordedRun(RECORDED), 2, tmp_path, "--trainer.max_staleness=0")


def test_filters_show_what_they_would_have_done(tmp_path: Path) -> None:
    """Step 2 has three groups of equal rewards: without them, the gradient is larger by the share of their tokens."""
    run = RecordedRun(RECORDED)
    before, after = (replayed(run, 2, tmp_path, *overrides) for overrides in ((), ("--filters.zero_variance=true",)))
    assert before.metrics["num_groups_without_gradient"] == after.metrics["num_groups_zero_variance"] == 3
    assert after.metrics["num_groups"] == 5
    assert after.metrics["num_groups_without_gradient"] == 0
    factor = before.metrics["num_tokens"] / after.metrics["num_tokens"]
    assert factor > 1.4
    assert after.metrics["grad_norm"] == pytest.approx(before.metrics["grad_norm"] * factor, rel=1e-4)
    lines = compare(run.recording(2).inputs, run.metrics(2), before, after)
    (line,) = [line for line in lines if line.name == "num_groups_zero_variance"]
    assert (line.recorded, line.replayed, line.changed) == (None, None, 3)
    with pytest.raises(SetupError, match=r"the filters leave none of the 8 groups of the step \(repetition 8\)"):
        replayed(run, 2, tmp_path, "--filters.repetition=drop", "--filters.max_compression_ratio=1e-9")


def test_an_exported_step_is_replayed_without_run_and_model(run: RecordedRun, tmp_path: Path) -> None:
    """One file holds weights, optimizer, groups and results; nothing else of the run is read."""
    file = tmp_path / "report.tar"
    overrides = [f"--model.path={MODEL}"]
    code = replay(run.path, step=3, overrides=overrides, export=file)
    expected = replayed(run, 3, tmp_path / "scratch")
    shutil.rmtree(run.path)
    with opened_run(file) as unpacked:
        assert unpacked.only_step() == 3
        start = start_of(unpacked, 3, model_path=tmp_path / "gone", scratch=tmp_path)
        again = replay_step(start, unpacked.recording(3), unpacked.recording(3).settings)
        assert unpacked.metrics(3)["step"] == 3
    assert again.weights_after == expected.weights_after
    assert again.metrics["loss"] == expected.metrics["loss"]
    same_environment = again.environment == RecordedRun(RECORDED).recording(3).inputs.environment
    assert code == 0 or not same_environment


def test_shows_another_random_state_and_another_result(run: RecordedRun, tmp_path: Path) -> None:
    """Each value that differs is marked by itself, and the whole then differs."""
    file = run.groups / "step-000001" / "step.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"random_state": "0" * 16}))
    metrics = run.path / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(row | {"num_tokens": row["num_tokens"] + 1}) + "\n" for row in rows))
    lines = lines_of(run, 1, tmp_path)
    assert [name for name in ("random state", "num_tokens", "reward_mean") if lines[name].agrees is False] == [
        "random state",
        "num_tokens",
    ]
    assert verdict(list(lines.values())) is False


def test_a_step_without_results_is_neither_same_nor_different(run: RecordedRun, tmp_path: Path) -> None:
    """As after a crash in the step: what it would have given is shown, with nothing beside it."""
    (run.path / "metrics.jsonl").unlink()
    lines = lines_of(run, 1, tmp_path)
    assert lines["loss"].agrees is None
    assert lines["weights before"].agrees is True
    assert verdict(list(lines.values())) is None


def test_a_step_that_is_trained_again_replaces_its_recording(run: RecordedRun) -> None:
    """Nothing of the history that was given up is left between the groups of the new one."""
    recording = run.recording(2)
    inputs = msgspec.structs.replace(recording.inputs, groups=recording.inputs.groups[:3])
    write_recording(run.groups, inputs, recording.settings, recording.groups[:3], recording.images)
    assert len(list((run.groups / "step-000002").glob("group-*"))) == 3
    assert read_recording(run.groups, 2).inputs == inputs
    assert recorded_steps(run.groups) == [1, 2, 3]
    assert not list(run.groups.glob(".*"))


def test_a_step_in_chunks_is_reproduced(run: RecordedRun, tmp_path: Path) -> None:
    """To the bit, with the order and the cut in which its groups came; the cut alone changes the last bits."""
    start, recording = start_of(run, 2, model_path=MODEL, scratch=tmp_path), run.recording(2)
    settings, version = recording.settings, recording.inputs.policy_version
    backend = InProcessBackend(start.model_path, settings.trainer, settings.algorithm, seed=0, temperature=1.0)
    backend.load(start.path)
    recorder = StepRecorder(run.path, settings, backend, run_id="run")
    reader, groups = open_reader(MODEL), recording.groups[::-1]
    with computing_threads(recording.inputs.environment.num_threads):
        backend.begin_step(version)
        recorder.begin(2, version)
        for chunk in (groups[:3], groups[3:4], groups[4:]):
            recorder.add(chunk, {sha256: recording.images[sha256] for group in chunk for sha256 in group.images})
            assert read_recording(run.groups, 2).groups[-1].id == chunk[-1].id, "it can be replayed as far as it is"
            backend.accumulate([reader.read(group, recording.images) for group in chunk])
        metrics = backend.finish_step()()
    recorded = run.recording(2)
    assert recorded.inputs.groups == recording.inputs.groups[::-1]
    assert recorded.inputs.chunks == (3, 1, 4)
    again = replay_step(start, recorded, settings)
    assert again.weights_before == recorded.inputs.weights
    assert again.weights_after == backend.digests().weights
    assert {name: again.metrics[name] for name in ("loss", "grad_norm", "num_chunks")} == {
        name: metrics[name] for name in ("loss", "grad_norm", "num_chunks")
    }
    uncut = msgspec.structs.replace(recorded.inputs, chunks=())
    whole = replay_step(start, replace(recorded, inputs=uncut), settings)
    assert whole.metrics["loss"] == pytest.approx(metrics["loss"], abs=1e-6)
    assert whole.weights_after != again.weights_after


def test_a_chunk_that_other_settings_leave_empty_is_left_out(run: RecordedRun, tmp_path: Path) -> None:
    """A filter takes all groups of the first chunk."""
    start, recording = start_of(run, 2, model_path=MODEL, scratch=tmp_path), run.recording(2)
    filtered = run.recording(2, ["--filters.zero_variance=true"]).settings
    flat = [group for group in recording.groups if screen(group, filtered.filters).reason]
    others = [group for group in recording.groups if not screen(group, filtered.filters).reason]
    assert flat
    assert others
    inputs = msgspec.structs.replace(recording.inputs, chunks=(len(flat), len(others)))
    cut = replace(recording, inputs=inputs, groups=(*flat, *others))
    metrics = replay_step(start, cut, filtered).metrics
    assert (metrics["num_groups"], metrics["num_chunks"]) == (len(others), 1)


def test_the_command_names_what_differs_between_the_environments(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a value differs, a person sees which library or processor may be why; the exit code is 1."""
    file = run.groups / "step-000001" / "step.json"
    inputs = json.loads(file.read_text())
    file.write_text(
        json.dumps(inputs | {"random_state": "0", "environment": inputs["environment"] | {"pillow": "1.0"}})
    )
    assert replay(run.path, step=1, overrides=[f"--model.path={MODEL}"], export=None) == 1
    output = capsys.readouterr().out
    assert f"step 1 of {inputs['run_id']} differs from the recorded step" in output
    assert "pillow: recorded with 1.0, replayed with" in output


@pytest.mark.slow
def test_the_command_shows_both_sides_and_what_other_settings_give(tmp_path: Path) -> None:
    """Recorded and replayed side by side, one more column for the overrides, and one sentence."""
    command = [sys.executable, "-m", "services.cli", "replay", str(RECORDED), "--step", "2"]
    override = "--algorithm.correction.high=1.0"
    done = subprocess.run(
        [*command, override, f"--model.path={MODEL}"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode in (0, 1), done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.split() == ["recorded", "replayed", override]
    assert {line.split()[0] for line in rest} >= {"loss", "grad_norm", "weights", "tis_capped_fraction"}
    if current_environment_is_recorded():
        assert done.returncode == 0
        assert rest[-1].endswith("is reproduced bit for bit")


def current_environment_is_recorded() -> bool:
    """Whether bits can be expected here."""
    recorded = RecordedRun(RECORDED).recording(1).inputs.environment
    here = current_environment(torch.device("cpu"))
    return msgspec.structs.replace(here, num_threads=recorded.num_threads) == recorded


def test_counts_of_earlier_releases_agree() -> None:
    """They logged whole numbers with six digits; other values agree to the bit or not at all."""
    lines = [
        Line(name=name, recorded=recorded, replayed=replayed, changed=None)
        for name, recorded, replayed in (
            ("num_tokens", 1234570.0, 1234567.0),
            ("num_tokens", 1234560.0, 1234567.0),
            ("loss", 0.333333, 1 / 3),
        )
    ]
    assert [line.agrees for line in lines] == [True, False, False]
