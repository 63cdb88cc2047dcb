"""Environments as users of SkyRL-Gym have them, without its base class."""

from typing import Any


class Guess:
    """The policy must say the ground truth; each turn shows a picture that the row brings."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] = {}) -> None:  # noqa: B006 - as theirs are
        self.ground_truth = extras["reward_spec"]["ground_truth"]
        self.max_turns = extras.get("max_turns", 1)
        self.picture = extras.get("picture")
        self.bonus = env_config.rewards.bonus if "rewards" in env_config else 0.0
        self.turns = 0

    def init(self, prompt: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return [*prompt, {"role": "user", "content": f"You have {self.max_turns} turns."}], {}

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        is_right = action == self.ground_truth
        done = is_right or self.turns >= self.max_turns
        content = [{"type": "image_url", "image_url": {"url": self.picture}}, {"type": "text", "text": "Again."}]
        return {
            "observations": [] if done else [{"role": "user", "content": content}],
            "reward": float(is_right) + self.bonus,
            "done": done,
            "metadata": {"truncated": done and not is_right},
        }

    def get_metrics(self) -> dict[str, Any]:
        return {"steps": self.turns, "env_id": "guess"}

    def close(self) -> None:
        """Nothing is held."""


class Answers(Guess):
    """Answers each turn with what the row's `answers` hold."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] = {}) -> None:  # noqa: B006 - as theirs are
        super().__init__(env_config, extras)
        self.answers = list(extras["answers"])

    def step(self, action: str) -> dict[str, Any]:
        return self.answers.pop(0)
