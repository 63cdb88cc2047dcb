"""Record the steps of a short run that tests/integration/trainer/replay/test_replay.py computes again.

    python -m tools.record_replay           train three small steps with real engines and keep them in
                                            tests/data/replay/tiny-cpu
    python -m tools.record_replay --again   keep the groups that are there and compute the steps again

The first is needed where records change. The second is right where a step is computed in another order: its numbers
then differ from the recorded ones by rounding errors. It prints by how much, so that a larger difference is noticed.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

_ROOT = Path(__file__).parents[1]
_MODEL = _ROOT / "models" / "tiny-qwen3-vl"
_TARGET = _ROOT / "tests" / "data" / "replay" / "tiny-cpu"
_OVERRIDES = (
    "--trainer.num_steps=3",
    "--trainer.groups_per_step=8",
    "--trainer.record_groups=true",
    "--rollout.replicas=1",
)


def record() -> None:
    """Train, and keep recordings and metrics; the model is the repository's own."""
    with TemporaryDirectory(prefix="record-replay-") as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "services.cli", "train", "recipes/tiny-cpu.toml", *_OVERRIDES]
        subprocess.run([*command, f"--run.folder={run}"], cwd=_ROOT, check=True)
        shutil.rmtree(_TARGET, ignore_errors=True)
        shutil.copytree(run / "groups", _TARGET / "groups")
        shutil.copyfile(run / "metrics.jsonl", _TARGET / "metrics.jsonl")


def record_again() -> None:
    """Compute each step after the other from the base model, and write its digests and metrics in place."""
    import msgspec

    from services.trainer.replay.recording import recorded_steps, step_folder
    from services.trainer.replay.replay import replay_step, start_of
    from services.trainer.replay.run import RecordedRun
    from services.trainer.telemetry.metrics_log import as_logged

    run = RecordedRun(_TARGET)
    rows = {step: dict(run.metrics(step)) for step in recorded_steps(run.groups)}
    with TemporaryDirectory(prefix="record-replay-") as folder:
        for step, row in rows.items():
            recording = run.recording(step)
            # Through the steps before it, which have been recorded again: their digests agree.
            start = start_of(run, step, model_path=_MODEL, scratch=Path(folder) / str(step))
            again = replay_step(start, recording, recording.settings)
            inputs = msgspec.structs.replace(
                recording.inputs,
                weights=again.weights_before,
                random_state=again.random_state,
                environment=again.environment,
            )
            file = step_folder(run.groups, step) / "step.json"
            file.write_bytes(msgspec.json.format(msgspec.json.encode(inputs), indent=1))
            for name in ("loss", "grad_norm"):
                sys.stdout.write(f"step {step} {name}: {row[name]!r} -> {again.metrics[name]!r}\n")
            row |= {name: as_logged(name, value) for name, value in again.metrics.items()}
            row["weights_digest"] = again.weights_after
    lines = "".join(json.dumps(row) + "\n" for row in rows.values())
    (_TARGET / "metrics.jsonl").write_text(lines)


def main() -> int:
    """Do one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="keep the recorded groups")
    if parser.parse_args().again:
        record_again()
    else:
        record()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
