"""The profile `remote`: another service verifies."""

from typing import Any

from services.reward.item import Item
from services.reward.profiles.profile import BoundedProfile, Decision, Forwarded


class RemoteProfile(BoundedProfile):
    """The credit is the number that the remote service answers."""

    def __init__(self, *, default_deadline_s: float, **settings: Any) -> None:
        """Take the settings of any profile, and the limit of an item that asks for none."""
        super().__init__(**settings)
        self.default_deadline_s = default_deadline_s

    def decide(self, item: Item) -> Decision:
        """Forward the item to the remote service."""
        return Forwarded()
