"""Settings of where a run's processes are started, section [launch] of a recipe."""

from typing import Literal

from penstock.config import Config


class LaunchConfig(Config):
    """Where `penstock train` starts the processes of a run; other commands start theirs on this machine."""

    backend: Literal["local", "ray"] = "local"
    """What starts the processes: this machine, or a Ray cluster, of which this machine is a node."""
    ray_address: str = "auto"
    """The Ray cluster, as host:port of its head. auto: the one that this machine, or a submitted job, belongs to."""
