"""Record the steps of a short run that tests/unit/test_replay.py computes again.

python -m tools.record_replay    train three small steps with real engines and keep them in tests/data/replay/tiny-cpu

Records change rarely; where they do, convert the recordings, or run this again.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

_ROOT = Path(__file__).parents[1]
_TARGET = _ROOT / "tests" / "data" / "replay" / "tiny-cpu"
_OVERRIDES = (
    "--trainer.num_steps=3",
    "--trainer.groups_per_step=8",
    "--trainer.record_groups=true",
    "--rollout.replicas=1",
)


def main() -> int:
    """Train, and keep recordings and metrics; the model is the repository's own."""
    with TemporaryDirectory(prefix="record-replay-") as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "services.cli", "train", "recipes/tiny-cpu.toml", *_OVERRIDES]
        subprocess.run([*command, f"--run.folder={run}"], cwd=_ROOT, check=True)
        shutil.rmtree(_TARGET, ignore_errors=True)
        shutil.copytree(run / "groups", _TARGET / "groups")
        shutil.copyfile(run / "metrics.jsonl", _TARGET / "metrics.jsonl")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
