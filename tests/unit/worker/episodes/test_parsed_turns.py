"""What an environment is told of a turn: read as the model's own chat template writes turns."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from penstock.environments import AssistantTurn, Observation, StepResult, Task
from penstock.model.chat.chat_template import Renderer
from penstock.records import ImagePart, Message, Sampling, TextPart, ToolCall
from tests.support.worker import scripted_episodes
from tests.support.worker.scripted_episodes import END, SECOND_PICTURE, ScriptedPolicy, make_player, make_prompt, play

TEMPLATES = Path(__file__).parents[3] / "data" / "chat_templates"
ZOOM: dict[str, Any] = {"name": "zoom", "parameters": {"properties": {"factor": {"type": "string"}}}}
CALL = "<tool_call>\n<function=zoom>\n<parameter=factor>\n2\n</parameter>\n</function>\n</tool_call>"


class Zooming:
    """Shows a tool, remembers how it was called, and answers the first turn with a picture inside of the reply."""

    last: "Zooming"

    def __init__(self) -> None:
        Zooming.last = self
        self.turns: list[AssistantTurn] = []

    async def reset(self, task: Task) -> Observation:
        return Observation(messages=task.messages, images=task.images, tools=(ZOOM,))

    async def step(self, turn: AssistantTurn) -> StepResult:
        self.turns.append(turn)
        if len(self.turns) == 2:
            return StepResult(observation=None)
        reply = Message(role="tool", parts=(TextPart(text="Closer: "), ImagePart(index=0)))
        return StepResult(observation=Observation(messages=(reply,), images=(SECOND_PICTURE,)))

    async def close(self) -> None:
        pass


async def test_a_turn_is_read_in_the_form_of_the_models_template(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3.5: the prompt opens `<think>`, calls are XML, and the tool that the environment shows types values."""
    monkeypatch.setitem(scripted_episodes.ENVIRONMENTS, "Zooming", f"{__name__}:Zooming")
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model_path))
    tokenizer.chat_template = (TEMPLATES / "qwen3_5.jinja").read_text()
    renderer = Renderer(tokenizer, image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"))
    policy = ScriptedPolicy(renderer, [(f"maybe {CALL}\n</think>\n\nI look.\n{CALL}{END}", 4), (f"hm {CALL}{END}", 4)])
    prompt = make_prompt(
        "Zooming",
        chat_template_kwargs={"add_vision_id": True},
        sampling=Sampling(temperature=1.0, max_new_tokens=500),
    )
    episode = await play(make_player(renderer, policy), prompt)
    first, second = Zooming.last.turns
    assert (first.reasoning, first.content) == (f"maybe {CALL}", "I look.")
    assert first.calls == (ToolCall(name="zoom", arguments={"factor": "2"}),)
    assert (second.reasoning, second.content, second.calls) == (f"hm {CALL}", "", ())
    assert [turn.tools for turn in episode.trajectory.turns] == [("zoom",), ()]
    shown = tokenizer.decode(list(policy.requests[1].input_ids))
    assert "<tool_response>\nCloser: Picture 2: <|vision_start|>" in shown
