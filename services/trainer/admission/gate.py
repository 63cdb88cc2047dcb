"""The gate: which prompt groups may be played, so that what is played can be trained before it is stale.

Invariant: groups admitted and not yet trained never exceed (max_staleness + 1) * groups_per_step (the admission rule of
AReaL, Fu et al. 2025, section 5.1, in whole groups). At any time each index is exactly one of: not yet
admitted, outstanding, waiting to be admitted again after a rejection, done (trained or dropped).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Self

from services.trainer.admission.batch_selection import Selection, select_batch

Standing = Literal["outstanding", "early", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A group that may be played."""

    index: int
    """Place in the run's order of admission."""
    attempt: int
    """0, and one more for each rejection."""
    version: int
    """Published policy version when it was admitted."""


class Gate:
    """Counts what is admitted and untrained. Pure state: it neither plays nor publishes anything."""

    def __init__(self, *, max_staleness: int, groups_per_step: int) -> None:
        """Start with nothing admitted."""
        self.max_staleness = max_staleness
        self.groups_per_step = groups_per_step
        self.num_trained = 0
        self.num_rejected = 0
        self.num_dropped = 0
        self._outstanding: dict[int, Admission] = {}
        self._rejected: dict[int, int] = {}  # index -> next attempt
        self._next_index = 0

    @property
    def capacity(self) -> int:
        """Most groups that may be admitted and untrained."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def outstanding(self) -> Mapping[int, Admission]:
        """Groups admitted and not yet trained, by index."""
        return MappingProxyType(self._outstanding)

    def num_admissible(self, num_steps_left: int | None = None) -> int:
        """Return how many groups may be admitted now.

        Args:
            num_steps_left: Optimizer steps that the run still takes; what those cannot train is not admitted.
        """
        limit = self.capacity
        if num_steps_left is not None:
            limit = min(limit, num_steps_left * self.groups_per_step)
        return max(0, limit - len(self._outstanding))

    def admit(self, version: int) -> Admission:
        """Admit the next group at the published `version`; rejected groups go first, the lowest index first.

        Raises:
            ValueError: the gate is full.
        """
        if len(self._outstanding) >= self.capacity:
            raise ValueError(f"the gate is full: {self.capacity} groups are admitted and untrained")
        if self._rejected:
            index = min(self._rejected)
            attempt = self._rejected.pop(index)
        else:
            index, attempt = self._next_index, 0
            self._next_index += 1
        admission = Admission(index=index, attempt=attempt, version=version)
        self._outstanding[index] = admission
        return admission

    def trained(self, indices: Iterable[int]) -> None:
        """Record that these groups were trained; each frees its place.

        Raises:
            KeyError: one of them is not outstanding; then none is recorded.
        """
        indices = tuple(indices)
        if missing := [index for index in indices if index not in self._outstanding]:
            raise KeyError(f"groups {missing} are not outstanding")
        for index in indices:
            del self._outstanding[index]
        self.num_trained += len(indices)

    def rejected(self, index: int, attempt: int) -> None:
        """Record that attempt `attempt` of an outstanding group was stale: it goes to the front of the line.

        Raises:
            KeyError: the group is not outstanding.
        """
        admission = self._outstanding.pop(index)
        self._rejected[index] = max(attempt, admission.attempt) + 1
        self.num_rejected += 1

    def dropped(self, index: int) -> None:
        """Record that an outstanding group can never be played; its prompt is given up.

        Raises:
            KeyError: the group is not outstanding.
        """
        del self._outstanding[index]
        self.num_dropped += 1

    def standing(self, index: int, attempt: int) -> Standing:
        """Say what a group that arrives from the workers is to the gate.

        `outstanding`: wanted. A later attempt than the admitted one counts too: a trainer that died after its last
        checkpoint had admitted it. `early`: that trainer had admitted it, this one has not yet; keep it until the gate
        reaches it. `done`: trained, dropped or rejected before; a duplicate.
        """
        if index in self._outstanding:
            return "outstanding" if attempt >= self._outstanding[index].attempt else "done"
        if index in self._rejected:
            return "early" if attempt >= self._rejected[index] else "done"
        return "early" if index >= self._next_index else "done"

    def select(self, finished: Mapping[int, int], version: int) -> Selection:
        """Choose the next batch from `finished` (index -> oldest token's version); see `select_batch`."""
        return select_batch(
            finished,
            {index: admission.version for index, admission in self._outstanding.items()},
            version=version,
            max_staleness=self.max_staleness,
            groups_per_step=self.groups_per_step,
        )

    def state(self) -> dict[str, Any]:
        """Return everything that a checkpoint must keep, as plain data for JSON."""
        return {
            "next_index": self._next_index,
            "outstanding": [[a.index, a.attempt, a.version] for a in self._outstanding.values()],
            "rejected": sorted([index, attempt] for index, attempt in self._rejected.items()),
            "num_trained": self.num_trained,
            "num_rejected": self.num_rejected,
            "num_dropped": self.num_dropped,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], *, max_staleness: int, groups_per_step: int) -> Self:
        """Restore what `state` returned. The bound may differ: a smaller one admits nothing until enough is trained."""
        gate = cls(max_staleness=max_staleness, groups_per_step=groups_per_step)
        gate._next_index = state["next_index"]
        gate._outstanding = {
            index: Admission(index=index, attempt=attempt, version=version)
            for index, attempt, version in state["outstanding"]
        }
        gate._rejected = dict(state["rejected"])
        gate.num_trained = state["num_trained"]
        gate.num_rejected = state["num_rejected"]
        gate.num_dropped = state["num_dropped"]
        return gate
