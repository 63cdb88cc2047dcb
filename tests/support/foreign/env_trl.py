"""Environments as users of TRL have them."""

from typing import Any

from PIL import Image


class Counter:
    """A counter is to reach the row's target."""

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.log: list[str] = []

    def reset(self, target: int, **kwargs: Any) -> str:
        self.counter, self.target = self.start, target
        return f" Count to {target} ({kwargs.get('answer')})."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: Value to add.

        Returns:
            The counter.
        """
        self.counter += step
        return self.counter

    async def wait(self) -> str:
        """Wait a moment."""
        return "waited"

    def look(self) -> list:
        """Look at the counter.

        Returns:
            A picture, and words.
        """
        picture = Image.new("RGB", (4, 3), (self.counter, 0, 0))
        return [{"type": "image", "image": picture}, {"type": "text", "text": "the counter"}]

    def fail(self) -> str:
        """Fail."""
        raise RuntimeError("the counter is stuck")

    def _hidden(self) -> None:
        """No tool."""


class Rows(Counter):
    """Its reset names what it takes, and shows a picture of the row."""

    def reset(self, images: list, answer: str) -> list:  # type: ignore[override]
        self.counter, self.target = 0, int(answer)
        return [{"type": "text", "text": f"{images[0].size} of {len(images)}"}]

    async def get_reward(self) -> float:  # type: ignore[override]
        return 0.25


class Untyped(Counter):
    """A public method is no tool."""

    def help(self, topic):
        return topic


class Members(Counter):
    """Members that are no methods, or cannot be read yet."""

    helper = int

    @property
    def state(self) -> str:
        raise RuntimeError("there is no game before reset")

    @staticmethod
    def rules() -> str:
        """Tell the rules."""
        return "count"

    @classmethod
    def make(cls) -> "Members":
        return cls()


class NoReward:
    """The reward service judges; the row is its own prompt."""

    def reset(self, **kwargs: Any) -> None:
        self.kwargs = kwargs

    def row(self) -> str:
        """Tell the row."""
        return str(sorted(self.kwargs))


class Whole(NoReward):
    """Its reset calls the row something else."""

    def reset(self, **row: Any) -> None:
        self.kwargs = row


class BadReward(NoReward):
    """Its reward is no number."""

    def get_reward(self) -> Any:
        return float("nan")
