"""Teach the tiny Qwen3-VL to zoom in on a picture that is too small to read, part of the way.

Supervised training by `penstock sft` with recipes/tiny-multi-turn-sft.toml, from a start that differs from
models/tiny-qwen3-vl in one thing: its image processor shrinks every image to 96 x 96 pixels. Training stops early, when
the model writes calls and answers in the right form and aims better than at random; reinforcement learning does the
rest.

    python -m models.pretrain_zoom --out models/tiny-qwen3-vl-zoom
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from penstock import shipped

RECIPE: Final = "tiny-multi-turn-sft"
START: Final = "tiny-qwen3-vl"
MAX_PIXELS: Final = 96 * 96

_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_README = """# tiny-qwen3-vl-zoom

`tiny-qwen3-vl`, which has begun to read the built-in geometry pictures, after {num_steps} steps of supervised training
on calls of the zoom: it writes calls and answers in the right form, and aims and reads right in part of its samples.
Its image processor shrinks every image to 96 x 96 pixels. Written by

    {command}

The recipe is `recipes/tiny-multi-turn-sft.toml`, the pictures are in `services/trainer/data/geometry_sheets.py`, and
`recipes/tiny-multi-turn.toml` goes on with reinforcement learning.
"""


def make_start(out: Path) -> None:
    """Write the model that training starts from to `out`."""
    shutil.copytree(shipped.models()[START], out)
    for name in _PROCESSORS:
        file = out / name
        file.write_text(json.dumps(_shrunk(json.loads(file.read_text())), indent=2, sort_keys=True) + "\n")
    (out / "README.md").unlink()


def pretrain(out: Path, overrides: Sequence[str]) -> None:
    """Train, and write the last checkpoint's model to `out`, which is replaced.

    Raises:
        SystemExit: training failed; nothing is written.
    """
    with tempfile.TemporaryDirectory() as scratch:
        start, runs = Path(scratch) / "start", Path(scratch) / "runs"
        make_start(start)
        settings = [f"--model.path={start}", f"--run.dir={runs}", *overrides]
        command = [sys.executable, "-m", "services.cli", "sft", str(shipped.named_recipe(RECIPE)), *settings]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit("training failed; see above")
        [latest] = runs.glob("*/checkpoints/latest")
        checkpoint = latest.parent / latest.read_text().strip()
        num_steps = int(checkpoint.name.removeprefix("step-"))
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(checkpoint / "model", out)
        for file in out.iterdir():
            file.chmod(0o644)
    asked = " ".join(["python -m models.pretrain_zoom --out models/tiny-qwen3-vl-zoom", *overrides])
    (out / "README.md").write_text(_README.format(num_steps=num_steps, command=asked))


def _shrunk(config: object) -> object:
    """An image processor's settings with no image larger than `MAX_PIXELS`."""
    if not isinstance(config, dict):
        return config
    return {key: MAX_PIXELS if key == "longest_edge" else _shrunk(value) for key, value in config.items()}


def main() -> None:
    """Read the command line and train on one thread, so that it is the same on every machine of a kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write, replaced if it exists")
    arguments, overrides = parser.parse_known_args()
    pretrain(arguments.out, overrides)


if __name__ == "__main__":
    main()
