"""Profiles that call a user's own verifier in a worker process; see `services.reward.worker_tasks.custom_verifier`."""

from collections.abc import Mapping
from importlib.metadata import entry_points

from services.reward.isolation.tasks import VerifierTask, sendable
from services.reward.item import Item
from services.reward.profiles.profile import MAX_RESPONSE_CHARS, BoundedProfile, Decision, Undecided

ENTRY_POINT_GROUP = "penstock.verifiers"


def find_verifiers(configured: Mapping[str, str]) -> dict[str, str]:
    """Return the location of each custom verifier by name: those of installed packages and those configured.

    Nothing is imported. A configured verifier replaces an installed one of the same name.
    """
    offered = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    return offered | dict(configured)


class CustomProfile(BoundedProfile):
    """Right is what the user's function calls right."""

    def decide(self, item: Item) -> Decision:
        """Return the question that the verifier must decide."""
        return Undecided(
            task=VerifierTask(
                verifier=self.name,
                golds=tuple(map(sendable, item.golds)),
                response=sendable(item.response[-MAX_RESPONSE_CHARS:]),
                prompt=sendable(item.prompt[-MAX_RESPONSE_CHARS:]),
            )
        )
