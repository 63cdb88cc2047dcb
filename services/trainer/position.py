"""Where the run stands, for the parts of the trainer that must agree on it."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Position:
    """Moved by the training loop, and by the publication of a version; read by feeder and batch source.

    The trainer's weights run ahead of the announced version while their push is under way.
    """

    num_steps: int
    """Optimizer steps of the whole run."""
    step: int
    """Optimizer steps taken."""
    version: int
    """Policy version of the trainer's weights: the one that the next step trains."""
    announced_version: int | None = None
    """The version announced last; None before the first announcement."""
    served_version: int = 0
    """The newest version that half of the replicas of its push serve; the announcement follows."""

    @property
    def num_steps_left(self) -> int:
        """Optimizer steps that the run still takes."""
        return max(0, self.num_steps - self.step)

    @property
    def admission_version(self) -> int | None:
        """The version at which groups are admitted, so that nothing older plays them; None before the first
        announcement."""
        return None if self.announced_version is None else max(self.announced_version, self.served_version)

    @property
    def num_steps_ahead(self) -> int:
        """Optimizer steps that the trainer's weights have beyond the version at which groups are admitted."""
        return 0 if self.admission_version is None else self.version - self.admission_version

    def advance(self) -> None:
        """Record an optimizer step."""
        self.step += 1
        self.version += 1

    def step_of(self, version: int) -> int:
        """Return the number of optimizer steps behind the weights of `version`, which must be of this start."""
        return self.step - (self.version - version)
