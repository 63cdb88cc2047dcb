"""TRL's GRPOTrainer on the same step, in its own process and virtual environment: prints one line of JSON.

Its rollout function returns the given responses, so the time from the beginning to the end of a step is its training:
the image processor, forward, backward and AdamW. It imports nothing from Penstock.

/path/to/trl/bin/python bench/trainer/trl_step.py --model DIR --workload FILE --steps 3 --threads 2 --out DIR
"""

import argparse
import importlib.metadata
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

SAMPLES_PER_FORWARD = 4
"""4 x 1,960 padded tokens: as many as Penstock's 8,192 tokens per forward pass allow."""


class Clock(TrainerCallback):
    """Measures the time from the beginning to the end of each optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.core_seconds: list[float] = []
        self.before_mb = 0.0
        self._started = self._cores_started = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started, self._cores_started = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._started)
        self.core_seconds.append(time.process_time() - self._cores_started)


def main() -> None:
    """Train `steps` steps after a first that is not counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--model", "--workload", "--out"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--steps", "--threads"):
        parser.add_argument(name, type=int, required=True)
    arguments = parser.parse_args()
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

    clock = Clock()
    num_in_step = len(rows) * num_samples
    config = GRPOConfig(
        output_dir=str(arguments.out),
        max_steps=arguments.steps + 1,
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
        callbacks=[clock],
    )
    trainer.train()
    found = {
        "seconds": clock.seconds[1:],
        "core_seconds": clock.core_seconds[1:],
        "before_mb": clock.before_mb,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "version": importlib.metadata.version("trl"),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
