"""The demo in TRL's GRPOTrainer, in one process and its own virtual environment; writes a line for each step.

Generation is transformers' own, in the trainer's process. It uses only Penstock's rule of the reward profile `geo3k`,
which scores in the process.

/path/to/trl/bin/python bench/demo/trl_grpo.py --task FILE --out DIR --threads 2
"""

import argparse
import json
import statistics
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from services.reward.item import Item  # noqa: E402
from services.reward.profiles.profile import Scoring  # noqa: E402
from services.reward.profiles.value import ValueProfile  # noqa: E402
from services.reward.verdict import Finding  # noqa: E402

_TOLERANCE = Fraction("0.05")
"""Tolerance of the profile `geo3k`."""


class StepLog(TrainerCallback):
    """Writes a line of JSON at the end of each step, and ends the training once the rewards are high enough."""

    def __init__(self, target: float, window: int) -> None:
        self.rewards: list[float] = []
        self._target, self._window = target, window
        self._started = self._cores_started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started, self._cores_started = time.monotonic(), time.process_time()

    def on_step_end(self, _arguments: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.monotonic()
        row = {
            "step": state.global_step,
            "reward_mean": self.rewards[-1],
            "step_s": now - self._started,
            "core_s": time.process_time() - self._cores_started,
            "ended_at": now,
        }
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
        recent = self.rewards[-self._window :]
        control.should_training_stop |= len(recent) == self._window and statistics.mean(recent) >= self._target


def main() -> None:
    """Train until the rewards are high enough, or for all steps of the task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", type=Path, required=True, help="as bench/demo/task.py writes it")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True, help="of torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    task = json.loads(arguments.task.read_text())
    rows = [
        {
            "prompt": [{"role": "user", "content": row["text"]}],
            "image": Image.open(arguments.task.parent / row["image"]).convert("RGB"),
            "gold": row["gold"],
        }
        for row in task["rows"]
    ]
    log = StepLog(task["target"], task["window"])
    profile = ValueProfile(tolerance=_TOLERANCE, name="geo3k", description="", scoring=Scoring())

    def reward(completions: list[Any], gold: list[str], **_: Any) -> list[float]:
        scores = [
            _score(profile, completion[-1]["content"], right)
            for completion, right in zip(completions, gold, strict=True)
        ]
        log.rewards.append(statistics.mean(scores))
        return scores

    num_samples, batch = task["samples_per_group"], task["groups_per_step"] * task["samples_per_group"]
    config = GRPOConfig(
        output_dir=str(arguments.out),
        max_steps=task["num_steps"],
        per_device_train_batch_size=batch,
        num_generations=num_samples,
        max_completion_length=task["max_new_tokens"],
        temperature=task["temperature"],
        generation_kwargs={"suppress_tokens": task["forbidden_ids"]},
        scale_rewards="group",
        learning_rate=task["learning_rate"],
        adam_beta1=task["betas"][0],
        adam_beta2=task["betas"][1],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=task["warmup_steps"],
        weight_decay=0.0,
        max_grad_norm=task["grad_clip"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=Qwen3VLForConditionalGeneration.from_pretrained(task["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoProcessor.from_pretrained(task["model"]),
        callbacks=[log],
    )
    trainer.train()


def _score(profile: ValueProfile, response: str, gold: str) -> float:
    """Return the score of the verifier's exact tier; answers that only its symbolic tier can judge count as wrong."""
    decision = profile.decide(Item(golds=(gold,), response=response, profile="geo3k"))
    return decision.credit if isinstance(decision, Finding) else 0.0


if __name__ == "__main__":
    main()
