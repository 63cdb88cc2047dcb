"""The gate: limits how many prompt groups may be played, so that each can be trained before it is stale.

Groups admitted and not yet trained never exceed (max_staleness + 1) * groups_per_step. This is the admission rule of
AReaL (Fu et al. 2025, section 5.1), in whole groups.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The admission rule. It keeps no count: `GroupLedger` does."""

    max_staleness: int
    """Most versions by which a group's oldest token may lag the published version when the group is trained."""
    groups_per_step: int
    """Groups in the batch of one optimizer step."""

    @property
    def capacity(self) -> int:
        """Most groups that may be admitted and untrained."""
        return (self.max_staleness + 1) * self.groups_per_step

    def num_admissible(self, num_untrained: int, *, num_steps_left: int, num_steps_ahead: int = 0) -> int:
        """Return how many more groups may be admitted at the newest version that replicas serve.

        Args:
            num_untrained: Groups admitted and not yet trained.
            num_steps_left: Remaining optimizer steps of the run. Groups beyond them are not admitted.
            num_steps_ahead: Optimizer steps taken since that version. Their groups still count until the next
                version is served: a group admitted now is already that many versions old.
        """
        num_steps = min(self.max_staleness + 1 - num_steps_ahead, num_steps_left)
        return max(0, num_steps * self.groups_per_step - num_untrained)

    def is_stale(self, *, oldest_version: int, newest_version: int, version: int) -> bool:
        """Return whether a group may not be trained at the published `version`.

        A group newer than the published version is stale too: its weights were lost before they were published.
        """
        return is_too_old(oldest_version, version, max_staleness=self.max_staleness) or newest_version > version


def is_too_old(oldest_version: int, version: int, *, max_staleness: int) -> bool:
    """Return whether tokens of `oldest_version` may not be trained at `version`."""
    return version - oldest_version > max_staleness
