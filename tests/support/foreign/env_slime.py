"""An environment as a user of slime has it: a file with `build_env`, and its class derived from a base of theirs."""

from __future__ import annotations

from typing import Any

from PIL import Image


class BaseEnv:
    """As slime's base class formats observations."""

    def format_observation(self, observation: dict) -> dict:
        content: list = []
        for images in (observation.get("multi_modal_data") or {}).values():
            content += [{"type": "image", "image": image} for image in images]
        content.append({"type": "text", "text": observation.get("obs_str", "")})
        return {"role": "user", "content": content}


class GuessEnv(BaseEnv):
    """The policy must say the label; a wrong answer is shown as a picture."""

    def __init__(self, *, label: str | None, max_turns: int | None, sample: Any, args: Any) -> None:
        self.label, self.max_turns, self.sample, self.args = label, max_turns, sample, args
        self.turn = 0

    def reset(self):
        self.turn = 0
        return {}, {"ground_truth_available": self.label is not None}

    def close(self):
        """Nothing is held."""

    def step(self, response_text: str):
        self.turn += 1
        if response_text == "crash":
            raise KeyError("board")
        if response_text == "none":
            return None
        if response_text == "sample":
            shown = f"{self.sample.index} {self.label} {self.sample.metadata} {self.args.size} {self.max_turns}"
            return {"obs_str": shown}, False, {}
        is_right = response_text == self.label
        info = {"score": float(is_right), "tool_executed": True, "name": "guess", "bad": float("nan")}
        if is_right or self.turn == self.max_turns:
            return {"obs_str": "never shown", "role": "tool"}, True, {**info, "truncated": not is_right}
        picture = Image.new("RGB", (4, 3), (255, self.turn, 0))
        obs = {"obs_str": "Wrong.", "role": "tool", "multi_modal_data": {"image": [picture]}}
        return obs, False, info


def build_env(sample: Any = None, args: Any = None, **_: Any) -> GuessEnv:
    """As slime calls it."""
    return GuessEnv(label=sample.label, max_turns=args.max_turns, sample=sample, args=args)
