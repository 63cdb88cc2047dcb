"""Building the wheel of this checkout, and running what is installed from it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ("-m", "hatchling", "build", "--target", "wheel", "--directory")
"""Arguments of Python as `make wheel` has them, before the folder."""


def run_apart(*command: str | Path, cwd: Path, timeout_s: float = 120) -> str:
    """Run it to its end, with nothing that leads back to the checkout; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Build it into an empty folder."""
    run_apart(sys.executable, *BUILD, folder, cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built
