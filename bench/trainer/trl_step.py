"""TRL's GRPOTrainer on the same step, in its own process and virtual environment; see `turns.py`.

Its rollout function returns the given responses, so the time from the beginning to the end of a step is its training:
the image processor, forward, backward and AdamW. It imports nothing from Penstock.

/path/to/trl/bin/python -m bench.trainer.trl_step --model DIR --workload FILE --threads 2 --out DIR
"""

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.trainer.turns import Turns

SAMPLES_PER_FORWARD = 4
"""4 x 1,960 padded tokens: as many as Penstock's 8,192 tokens per forward pass allow."""


class InTurn(TrainerCallback):
    """Takes each optimizer step in its turn."""

    def __init__(self) -> None:
        self._turns = Turns()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._turns.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._turns.end(version=importlib.metadata.version("trl"))


def main() -> None:
    """Train until the turns end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--model", "--workload", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    in_turn = InTurn()
    torch.set_num_threads(arguments.threads)
    workload = json.loads(arguments.workload.read_text())
    processor = AutoProcessor.from_pretrained(arguments.model)
    num_samples = len(workload["rewards"])
    rows = [
        {
            "prompt": [{"role": "user", "content": workload["text"]}],
            "image": Image.open(image).convert("RGB"),
            "row": row,
        }
        for row, image in enumerate(workload["images"])
    ]

    def rollout(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """Return the given responses; the order of groups does not matter, because all have equally many tokens."""
        encoded = processor.apply_chat_template(
            prompts, add_generation_prompt=True, tokenize=True, return_dict=True, padding=False
        )
        responses = [response for group in workload["responses"] for response in group]
        return {"prompt_ids": encoded["input_ids"], "completion_ids": responses, "logprobs": None}

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return workload["rewards"] * (len(completions) // num_samples)

    num_in_step = len(rows) * num_samples
    config = GRPOConfig(
        output_dir=str(arguments.out),
        max_steps=sys.maxsize,
        per_device_train_batch_size=SAMPLES_PER_FORWARD,
        gradient_accumulation_steps=num_in_step // SAMPLES_PER_FORWARD,
        num_generations=num_samples,
        max_completion_length=2048,
        learning_rate=1e-6,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        shuffle_dataset=False,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=Qwen3VLForConditionalGeneration.from_pretrained(arguments.model, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=processor,
        rollout_func=rollout,
        callbacks=[in_turn],
    )
    trainer.train()


if __name__ == "__main__":
    main()
