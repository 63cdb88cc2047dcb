"""Hands a job to Slurm's own sbatch."""

import shutil
import subprocess
from pathlib import Path

from penstock.errors import SetupError

_TIMEOUT_S = 60.0


def require_sbatch() -> None:
    """Check that jobs can be submitted here.

    Raises:
        SetupError: there is no sbatch.
    """
    if shutil.which("sbatch") is None:
        raise SetupError(
            "no sbatch on PATH: jobs are submitted on a login node of the cluster; go there, or give --dry-run, which "
            "only writes the file"
        )


def submit(script: Path) -> str:
    """Submit the file and return the job's id.

    Raises:
        SetupError: Slurm refused it, or did not answer.
    """
    retry = f"correct it in {script} and run `sbatch {script}`"
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise SetupError(f"sbatch did not answer within {_TIMEOUT_S:g} s; look at `sinfo`, then {retry}") from None
    if done.returncode != 0:
        said = " ".join(line.removeprefix("sbatch: error: ").strip() for line in done.stderr.splitlines())
        raise SetupError(f"Slurm refuses the job: {said or f'sbatch exits with {done.returncode}'}; {retry}")
    return done.stdout.strip().partition(";")[0]  # on a federation the cluster's name follows
