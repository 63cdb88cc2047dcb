"""Settings of a run on a Slurm cluster, section [slurm] of a recipe; most people keep it in a recipe of its own, which
they lay over others."""

from typing import Final, Self

import pydantic

from penstock.config import Config

_TIME: Final = r"^((\d+-)?\d+(:\d+){0,2})?$"
_OF_COMMAND: Final = ("-N", "--nodes")
_OURS: Final = ("-n", "--ntasks", "--ntasks-per-node", "--signal", "--requeue", "--no-requeue", "--chdir", "-D")


class SlurmConfig(Config):
    """The job that `penstock slurm` submits."""

    partition: str = ""
    """Partition, or several with commas; empty: the cluster's default."""
    account: str = ""
    """Account that is charged; empty: your default."""
    time: str = pydantic.Field(default="", pattern=_TIME)
    """Time limit in Slurm's form, such as "24:00:00" or "2-00:00:00"; "0": none; empty: the partition's."""
    gpus_per_node: int = pydantic.Field(default=0, ge=0)
    """GPUs of each node; 0: everything is computed on CPUs."""
    cpus_per_node: int = pydantic.Field(default=0, ge=0)
    """CPUs of each node; 0: whole nodes, which no other job shares."""
    requeue: bool = True
    """Whether the job is queued again, and goes on from its newest checkpoint, when it was preempted, a node failed or
    its time is over."""
    signal_s: int = pydantic.Field(default=300, ge=1, le=65535)
    """Seconds before the time limit at which the run ends its step and writes a checkpoint. It must be longer than a
    step takes with its push and checkpoint; Slurm may be up to 60 s early."""
    container_image: str = ""
    """Image in which every process runs: srun's --container-image, which the plugin pyxis provides. Empty: none."""
    container_mounts: tuple[str, ...] = ()
    """Folders of the nodes that the container sees: "/shared", "/scratch:/data". The run folder must be among them."""
    command: str = ""
    """Command that runs `penstock` on the nodes, for other containers: "apptainer exec --nv penstock.sif penstock".
    Empty: that of this installation, or with an image the image's."""
    setup: tuple[str, ...] = ()
    """Lines of bash before anything else: "module load cuda", "export NCCL_SOCKET_IFNAME=ib0"."""
    options: tuple[str, ...] = ()
    """Further options of sbatch: "--constraint=h100", "--mem=0", "--qos=high"."""

    @pydantic.field_validator("options")
    @classmethod
    def _are_options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            is_short = not option.startswith("--")
            name = option[:2] if is_short else option.partition("=")[0].partition(" ")[0]
            if not option.startswith("-") or "\n" in option:
                raise ValueError(f"{option!r} is not an option of sbatch; write it as --name=value")
            if name in _OF_COMMAND:
                raise ValueError(f"{option!r}: give the number of nodes as `penstock slurm --nodes`; leave it out")
            if name in _OURS:
                raise ValueError(f"{option!r} is set by `penstock slurm` itself; leave it out")
        return options

    @pydantic.model_validator(mode="after")
    def _has_time_to_train(self) -> Self:
        if self.time and 0 < _seconds(self.time) <= self.signal_s:
            raise ValueError(
                f"time = {self.time!r} is over before signal_s = {self.signal_s}: the run would be asked to end as "
                "soon as it starts; raise time, or lower signal_s"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _mounts_have_a_container(self) -> Self:
        if self.container_mounts and not self.container_image:
            raise ValueError("container_mounts has no effect without container_image; give both, or use command")
        return self


def _seconds(time: str) -> int:
    """Return the length of a time limit: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = 0, *[*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
