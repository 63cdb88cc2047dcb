"""TRL's GRPOTrainer plays an environment, in its own process and virtual environment. It imports nothing of Penstock.

Reads one JSON object: `file` and `class` of the environment, `model` (folder), `row`, and `said`: for each sample of
the group what the policy says, turn by turn. Writes one into the file `answer`: `tools` (schemas as the policy sees
them), and for each sample `prompt` (messages after reset), `completion` (its messages and the tools') and `reward`.
Pictures are written as their sizes and first pixels.

All but the policy's words is TRL's: the step is a whole one, gradient and update included.
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_vl_chat_template


class ScriptedTrainer(GRPOTrainer):
    """Says what it is given, and keeps what TRL makes of it."""

    said: list[list[str]]
    played: list[dict[str, Any]]

    def _generate(self, prompts: list[Any]) -> Any:
        """Play the samples of a group; prompts are as `reset` left them."""
        self._left = [list(turns) for turns in self.said]
        generated = super()._generate(prompts)
        self.played = [
            {"prompt": shown(prompt), "completion": shown(completion)}
            for prompt, completion in zip(prompts, generated[3], strict=True)
        ]
        return generated

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        """Say the next turns of the samples that are not finished."""
        speaking = [turns for turns in self._left if turns]
        assert len(speaking) == len(prompt_ids), f"{len(prompt_ids)} samples go on, {len(speaking)} have turns left"
        texts = [turns.pop(0) for turns in speaking]
        end = self._tokenizer.eos_token
        return [self._tokenizer(text + end, add_special_tokens=False)["input_ids"] for text in texts], None

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the rewards."""
        rewards = super()._calculate_rewards(*args, **kwargs)
        for sample, reward in zip(self.played, rewards.sum(1).tolist(), strict=True):
            sample["reward"] = reward
        return rewards


def shown(messages: Any) -> list[list[Any]]:
    """Return role and parts of each message, texts side by side as one."""
    return [[message["role"], parts_of(message["content"])] for message in messages]


def parts_of(content: Any) -> list[str]:
    """Return the parts of a message's content."""
    parts: list[str] = []
    for part in [content] if isinstance(content, str) else content:
        if isinstance(part, dict) and part["type"] == "image":
            image = part["image"]
            parts.append(f"picture {image.size} {image.convert('RGB').getpixel((0, 0))}")
        else:
            parts.append(part if isinstance(part, str) else part["text"])
    return parts


def main() -> None:
    """Train one step of one group."""
    given = json.load(sys.stdin)
    spec = importlib.util.spec_from_file_location("environment", given["file"])
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    processor = AutoProcessor.from_pretrained(given["model"])
    processor.chat_template = qwen3_vl_chat_template
    model = AutoModelForImageTextToText.from_pretrained(given["model"])
    with tempfile.TemporaryDirectory() as folder:
        ScriptedTrainer.said = given["said"]
        trainer = ScriptedTrainer(
            model=model,
            processing_class=processor,
            environment_factory=getattr(module, given["class"]),
            train_dataset=Dataset.from_list([given["row"]]),
            args=GRPOConfig(
                output_dir=folder,
                max_steps=1,
                num_generations=len(given["said"]),
                per_device_train_batch_size=len(given["said"]),
                max_completion_length=1500,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                use_cpu=True,
                bf16=False,
            ),
        )
        tools = [get_json_schema(tool) for tool in trainer.tools]
        trainer.train()
    written = {"tools": tools, "samples": trainer.played, "num_steps": trainer.state.global_step}
    Path(given["answer"]).write_text(json.dumps(written))


if __name__ == "__main__":
    main()
