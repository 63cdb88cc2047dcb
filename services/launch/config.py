"""Settings of `penstock train`, section [launch] of a recipe."""

import pydantic

from penstock.config import Config


class LaunchConfig(Config):
    """How `penstock train` keeps the processes of a run going."""

    max_restarts: int = pydantic.Field(default=5, ge=0)
    """A process that died more often than this within the window ends the run."""
    restart_window_s: float = pydantic.Field(default=600.0, gt=0)
    """The window for counting restarts."""
    restart_backoff_s: float = pydantic.Field(default=0.5, ge=0)
    """Pause before a process is started again; it doubles with each restart in the window, up to 10 s."""
    stop_grace_s: float = pydantic.Field(default=16.0, ge=0)
    """How long stopping may take before what is left is killed. It goes in three stages: worker and trainer; router,
    engines and reward; nats-server. Each leaves a fifth of the time to every later one."""
