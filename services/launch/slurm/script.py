"""Writes the sbatch file of a run, from the template job.sh.in beside this module."""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from services.launch.slurm.config import SlurmConfig
from services.launch.slurm.placement import NodeShare
from services.recipe import Recipe

_TEMPLATE = Path(__file__).with_name("job.sh.in")
_PLACE = re.compile(r"@\{(\w+)\}")
_REQUEUE = """\
    echo "interrupted: queued again, to go on from its checkpoint"
    scontrol requeue "$SLURM_JOB_ID\""""
_NO_REQUEUE = """\
    echo "interrupted; \\`sbatch $run/job.sh\\` continues the run\""""


def job_script(recipe: Recipe, folder: Path, shares: Sequence[NodeShare], *, working_directory: Path) -> str:
    """Return the sbatch file.

    Args:
        recipe: The recipe, which `folder` holds as recipe.toml.
        folder: The run's own folder, absolute.
        shares: Engines and workers of each node.
        working_directory: Folder in which the processes start, absolute; the recipe's paths may be relative to it.
    """
    slurm = recipe.slurm
    values = {
        "name": recipe.run.name,
        "num_nodes": f"{len(shares)} {'node' if len(shares) == 1 else 'nodes'}",
        "options": "\n".join(
            f"#SBATCH {option}" for option in _options(recipe, folder, len(shares), working_directory)
        ),
        "setup": "\n".join(["", *slurm.setup, ""]) if slurm.setup else "",  # before set -u, which modules do not bear
        "run": shlex.quote(str(folder)),
        "penstock": _command(slurm),
        "shares": "\n".join(f'  "{_share(index, share)}"' for index, share in enumerate(shares)),
        "srun": "".join(f" {option}" for option in _srun_options(slurm, working_directory)),
        "signal_s": str(slurm.signal_s),
        "interrupted": _REQUEUE if slurm.requeue else _NO_REQUEUE,
    }
    return _PLACE.sub(lambda match: values[match[1]], _TEMPLATE.read_text())


def _options(recipe: Recipe, folder: Path, num_nodes: int, working_directory: Path) -> Iterator[str]:
    slurm = recipe.slurm
    yield f"--job-name={recipe.run.name}"
    yield f"--nodes={num_nodes}"
    yield "--ntasks-per-node=1"
    if slurm.gpus_per_node:
        yield f"--gpus-per-node={slurm.gpus_per_node}"
    yield f"--cpus-per-task={slurm.cpus_per_node}" if slurm.cpus_per_node else "--exclusive"
    for name in ("partition", "account", "time"):
        if value := getattr(slurm, name):
            yield f"--{name}={shlex.quote(value)}"
    yield "--requeue" if slurm.requeue else "--no-requeue"
    yield f"--signal=TERM@{slurm.signal_s}"
    yield f"--chdir={shlex.quote(str(working_directory))}"
    yield f"--output={shlex.quote(str(folder / 'slurm-%j.log'))}"
    yield "--open-mode=append"
    yield from slurm.options


def _command(slurm: SlurmConfig) -> str:
    if slurm.command:
        return slurm.command
    if slurm.container_image:
        return "penstock"
    beside_python = Path(sys.executable).with_name("penstock")
    if beside_python.exists():
        return shlex.quote(str(beside_python))
    return f"{shlex.quote(sys.executable)} -P -m services.cli"


def _share(index: int, share: NodeShare) -> str:
    if index == 0:
        engines = (
            f"--rollout.replicas={share.unified} --rollout.prefill={share.prefill} --rollout.decode={share.decode}"
        )
        return f"{engines} --worker.num={share.workers}"
    given = {"unified": share.unified, "prefill": share.prefill, "decode": share.decode, "workers": share.workers}
    return " ".join(f"--{name}={number}" for name, number in given.items() if number)


def _srun_options(slurm: SlurmConfig, working_directory: Path) -> Iterator[str]:
    if slurm.gpus_per_node:
        yield f"--gpus-per-node={slurm.gpus_per_node}"
    if slurm.container_image:
        yield f"--container-image={shlex.quote(slurm.container_image)}"
        yield f"--container-workdir={shlex.quote(str(working_directory))}"
    if slurm.container_mounts:
        yield f"--container-mounts={shlex.quote(','.join(slurm.container_mounts))}"
