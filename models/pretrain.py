"""Teach the tiny Qwen3-VL to read the geometry pictures, part of the way.

The model sees what a rollout will show it: the chat template's prompt with the picture, then the answer and
``<|im_end|>``; only the answer's tokens are trained, and all of them are correct. Training stops early, when the
model knows the form of an answer and one sample at temperature 1 is right as often as ``--accuracy``. The seeing
has then begun, and reinforcement learning does the rest.

It is no recipe of ``penstock sft`` because it makes the vocabulary and the random weights too, and stops at an accuracy
where supervised training stops after a number of steps (docs/training/sft.md).

    python -m models.pretrain --out models/tiny-qwen3-vl
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import structlog
import torch
from PIL import Image

from models.tiny_qwen3_vl import (
    MERGE_SIZE,
    PATCH_SIZE,
    PIXEL_MEAN,
    PIXEL_STD,
    TEMPORAL_PATCH_SIZE,
    build_config,
    build_model,
    build_processor,
    build_tokenizer,
    count_parameters,
    save_model,
)
from services.trainer.data.geometry import (
    KINDS,
    GeometryDataset,
    GeometryProblem,
    Kind,
    draw_problem,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import Qwen3VLForConditionalGeneration, Qwen3VLProcessor

log = structlog.get_logger()

IGNORED: Final = -100
MAX_NEW_TOKENS: Final = 12
ROW_SEED: Final = 7_000_000
"""Added to the seed for the training rows: recipes use small seeds, so theirs are other draws."""
HELD_OUT_SEED: Final = 8_000_000
"""Added to the seed for the held-out rows. They are other draws of the same pictures: pre-training sees them all."""

README: Final = """# tiny-qwen3-vl

A Qwen3-VL of a million parameters that has begun to read the built-in geometry pictures: it answers in the right
form and is right in part of its samples. It was trained on correct answers and stopped early; reinforcement
learning does the rest. Written by

    {command}

| | |
|---|---|
{table}

The architecture, tokenizer and template are in `models/tiny_qwen3_vl.py`, the pictures in
`services/trainer/data/geometry.py`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Right-padded prompts and answers with their pictures.

    B: rows, T: tokens, N: patches of all rows, D: pixels of a patch, X: the three axes time, height, width.
    """

    input_ids_BT: torch.Tensor
    labels_BT: torch.Tensor
    """The answer's tokens at their own positions, elsewhere ``IGNORED``."""
    position_ids_XBT: torch.Tensor
    pixel_values_ND: torch.Tensor
    grid_thw_BX: torch.Tensor


def patchify(picture: Image.Image) -> NDArray[np.float32]:
    """Turn a picture whose sides are multiples of 32 px into ``pixel_values`` as the processor makes them.

    Returns:
        float32, shape (patches, channels * temporal_patch_size * patch_size ** 2), in merge-block order.
    """
    # The processor folds the rescaling into mean and deviation; the last bit follows only in its order.
    pixels_HWC = np.asarray(picture, dtype=np.float32)
    pixels_HWC = (pixels_HWC - np.float32(PIXEL_MEAN * 255)) / np.float32(PIXEL_STD * 255)
    height, width, channels = pixels_HWC.shape
    block = PATCH_SIZE * MERGE_SIZE
    if height % block or width % block:
        raise ValueError(f"picture is {width}x{height} px: both sides must be multiples of {block}")
    cut = pixels_HWC.transpose(2, 0, 1).reshape(
        channels, height // block, MERGE_SIZE, PATCH_SIZE, width // block, MERGE_SIZE, PATCH_SIZE
    )
    patches = cut.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, channels, 1, PATCH_SIZE * PATCH_SIZE)
    return np.repeat(patches, TEMPORAL_PATCH_SIZE, axis=2).reshape(len(patches), -1)


def format_answer(answer: str) -> str:
    """Return what the model says to give an answer, its end token included."""
    return f"\\boxed{{{answer}}}<|im_end|>"


class BatchBuilder:
    """Renders problems with the processor once per kind, and then only swaps answers and pictures."""

    def __init__(self, processor: Qwen3VLProcessor, model: Qwen3VLForConditionalGeneration) -> None:
        """Render one prompt of every kind."""
        self.tokenizer = processor.tokenizer
        self.prompt_ids: dict[Kind, list[int]] = {}
        self.position_ids: dict[Kind, torch.Tensor] = {}
        blank = Image.new("RGB", draw_problem(GeometryDataset(1).problem(0)).size)
        for kind in KINDS:
            points = {name: (0, 0) for name in "PAB"}
            text = GeometryProblem(kind=kind, points=points).text.removeprefix("<image>")
            message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
            prompt = processor.apply_chat_template([message], add_generation_prompt=True)
            rendered = processor(text=[prompt + r"\boxed{00}<|im_end|>"], images=[blank], return_tensors="pt")
            bare = processor(text=[prompt], images=[blank], return_tensors="pt")
            self.prompt_ids[kind] = bare["input_ids"][0].tolist()
            self.position_ids[kind], _ = model.model.get_rope_index(
                rendered["input_ids"],
                mm_token_type_ids=rendered["mm_token_type_ids"],
                image_grid_thw=rendered["image_grid_thw"],
            )
            self.grid_thw = rendered["image_grid_thw"]

    def build(self, problems: Sequence[GeometryProblem], answers: Sequence[str] | None = None) -> Batch:
        """Render a batch of problems with the answers given, or with the correct ones."""
        rows: list[tuple[list[int], list[int]]] = []
        for problem, answer in zip(problems, answers or [p.answer for p in problems], strict=True):
            rows.append((self.prompt_ids[problem.kind], self.tokenizer.encode(format_answer(answer))))
        width = max(len(prompt) + len(answer_ids) for prompt, answer_ids in rows)
        input_ids = torch.full((len(rows), width), self.tokenizer.pad_token_id)
        labels = torch.full((len(rows), width), IGNORED)
        positions = torch.zeros((3, len(rows), width), dtype=torch.long)
        for index, (prompt, answer_ids) in enumerate(rows):
            end = len(prompt) + len(answer_ids)
            input_ids[index, :end] = torch.tensor(prompt + answer_ids)
            labels[index, len(prompt) : end] = torch.tensor(answer_ids)
            positions[:, index, :end] = self.position_ids[problems[index].kind][:, 0, :end]
        pixels = np.concatenate([patchify(draw_problem(problem)) for problem in problems])
        return Batch(
            input_ids_BT=input_ids,
            labels_BT=labels,
            position_ids_XBT=positions,
            pixel_values_ND=torch.from_numpy(pixels),
            grid_thw_BX=self.grid_thw.expand(len(rows), 3),
        )


def answer_logprobs(model: Qwen3VLForConditionalGeneration, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of every answer token at temperature 1, shape (B, T - 1), and their mask.

    Right padding follows everything that is scored, so causal attention needs no padding mask.
    """
    hidden_BTD = model.model(
        input_ids=batch.input_ids_BT,
        position_ids=batch.position_ids_XBT,
        pixel_values=batch.pixel_values_ND,
        image_grid_thw=batch.grid_thw_BX,
        use_cache=False,
    ).last_hidden_state
    targets_BT = batch.labels_BT[:, 1:]
    mask_BT = targets_BT != IGNORED
    logits_KV = model.lm_head(hidden_BTD[:, :-1][mask_BT])
    scored_K = -torch.nn.functional.cross_entropy(logits_KV, targets_BT[mask_BT], reduction="none")
    logprobs_BT = scored_K.new_zeros(targets_BT.shape).masked_scatter(mask_BT, scored_K)
    return logprobs_BT, mask_BT


@torch.no_grad()  # type: ignore[untyped-decorator]  # torch's stubs are skipped
def measure_accuracy(
    model: Qwen3VLForConditionalGeneration, builder: BatchBuilder, problems: Sequence[GeometryProblem]
) -> dict[str, float]:
    """Return the expected accuracy of one sample at temperature 1, by kind and over ``all``.

    It is the probability of the whole correct answer, which is what the mean over infinitely many samples
    would be, without their noise.
    """
    totals: dict[str, list[float]] = {}
    for start in range(0, len(problems), 64):
        chunk = problems[start : start + 64]
        logprobs_BT, _ = answer_logprobs(model, builder.build(chunk))
        for problem, chance in zip(chunk, logprobs_BT.sum(1).exp().tolist(), strict=True):
            totals.setdefault(problem.kind, []).append(chance)
            totals.setdefault("all", []).append(chance)
    return {kind: sum(values) / len(values) for kind, values in sorted(totals.items())}


@torch.no_grad()  # type: ignore[untyped-decorator]  # torch's stubs are skipped
def sample_accuracy(
    model: Qwen3VLForConditionalGeneration, builder: BatchBuilder, problems: Sequence[GeometryProblem]
) -> tuple[float, float]:
    """Sample every problem once at temperature 1 with the cached decoder and read the boxes.

    Returns:
        The share of correct answers and the share of samples that are one box and an end token.
    """
    num_correct = num_formatted = 0
    for kind in sorted({problem.kind for problem in problems}):
        alike = [problem for problem in problems if problem.kind == kind]
        batch = builder.build(alike)
        prompt_BT = batch.input_ids_BT[:, : len(builder.prompt_ids[kind])]
        output_BT = model.generate(
            input_ids=prompt_BT,
            attention_mask=torch.ones_like(prompt_BT),
            mm_token_type_ids=(prompt_BT == model.config.image_token_id).int(),
            pixel_values=batch.pixel_values_ND,
            image_grid_thw=batch.grid_thw_BX,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=True,
            temperature=1.0,
            top_k=0,  # transformers samples from the best 50 unless told
        )
        texts = builder.tokenizer.batch_decode(output_BT[:, prompt_BT.shape[1] :])
        for problem, text in zip(alike, texts, strict=True):
            said = text.replace(builder.tokenizer.pad_token, "")
            num_correct += said == format_answer(problem.answer)
            num_formatted += re.fullmatch(r"\\boxed\{\d+\}<\|im_end\|>", said) is not None
    return num_correct / len(problems), num_formatted / len(problems)


def write_readme(path: Path, *, args: argparse.Namespace, facts: dict[str, str]) -> None:
    """Say beside the checkpoint how it was made, from the run that made it."""
    command = f"python -m models.pretrain --out models/tiny-qwen3-vl --seed {args.seed}"
    command += f" --accuracy {args.accuracy} --kinds {' '.join(args.kinds)}"
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    path.write_text(README.format(command=command, table=table))


def train_step(model: Qwen3VLForConditionalGeneration, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """Take one optimizer step on the answers of a batch and return its loss, a mean over tokens."""
    logprobs_BT, mask_BT = answer_logprobs(model, batch)
    loss = -logprobs_BT.sum() / mask_BT.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def train(
    model: Qwen3VLForConditionalGeneration, builder: BatchBuilder, *, args: argparse.Namespace
) -> tuple[int, dict[str, float]]:
    """Train until ``--accuracy``; return the number of steps and the accuracy by kind.

    Raises:
        SystemExit: the accuracy was not reached within ``--max-steps``.
    """
    rows = GeometryDataset(args.max_steps * args.batch_size, seed=ROW_SEED + args.seed, kinds=args.kinds)
    held = GeometryDataset(args.num_eval, seed=HELD_OUT_SEED + args.seed, kinds=args.kinds)
    held_problems = [held.problem(index) for index in range(len(held))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.01)
    for step in range(1, args.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / args.warmup_steps)
        first = (step - 1) * args.batch_size
        problems = [rows.problem(first + row) for row in range(args.batch_size)]
        loss = train_step(model, optimizer, builder.build(problems))
        if step % args.eval_every:
            continue
        accuracy = measure_accuracy(model, builder, held_problems)
        rounded = {kind: round(value, 3) for kind, value in accuracy.items()}
        log.info("accuracy.measured", step=step, loss=round(loss, 4), **rounded)
        if accuracy["all"] >= args.accuracy:
            return step, accuracy
    raise SystemExit(f"accuracy {args.accuracy} was not reached by step {args.max_steps}: raise --max-steps")


def pretrain(args: argparse.Namespace) -> None:
    """Train from scratch until the model sees a little, then write the checkpoint and its README.

    Raises:
        SystemExit: the accuracy was not reached within ``--max-steps``; nothing is written.
    """
    tokenizer = build_tokenizer()
    processor = build_processor(tokenizer)
    model = build_model(build_config(tokenizer), seed=args.seed)
    builder = BatchBuilder(processor, model)
    log.info("model.built", num_parameters=count_parameters(model))
    started = time.monotonic()
    step, accuracy = train(model, builder, args=args)
    facts = {
        "parameters": f"{count_parameters(model):,}, float32",
        "seed": str(args.seed),
        "training": f"{step} steps of {args.batch_size} rows with correct answers, AdamW {args.lr:g}",
        "time": f"{time.monotonic() - started:.0f} s on one core",
        f"probability of the whole correct answer, {args.num_eval} held-out rows": ", ".join(
            f"{kind} {value:.3f}" for kind, value in accuracy.items()
        ),
    }
    torch.manual_seed(args.seed)
    final = GeometryDataset(args.num_final, seed=HELD_OUT_SEED + args.seed + 1, kinds=args.kinds)
    correct, formatted = sample_accuracy(model, builder, [final.problem(index) for index in range(len(final))])
    facts[f"sampled accuracy, temperature 1, {args.num_final} held-out rows"] = f"{correct:.3f}"
    facts["samples that are one box and an end token"] = f"{formatted:.3f}"
    save_model(model, processor, args.out)
    write_readme(args.out / "README.md", args=args, facts=facts)
    log.info("model.written", path=str(args.out), step=step, sampled=correct, formatted=formatted)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write, replaced if it exists")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the rows")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["x", "y", "length"], help="kinds of problem")
    parser.add_argument("--accuracy", type=float, default=0.37, help="accuracy at which training stops")
    parser.add_argument("--max-steps", type=int, default=1000, help="give up after this many steps")
    parser.add_argument("--batch-size", type=int, default=48, help="rows per step")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate after warm-up")
    parser.add_argument("--warmup-steps", type=int, default=50, help="steps of linear warm-up")
    parser.add_argument("--eval-every", type=int, default=5, help="steps between two measurements")
    parser.add_argument("--num-eval", type=int, default=256, help="held-out rows to measure on")
    parser.add_argument("--num-final", type=int, default=1024, help="held-out rows to sample at the end")
    return parser.parse_args()


def main() -> None:
    """Run the pretraining on one thread, so that it is the same on every machine of a kind."""
    args = parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(1)
    pretrain(args)


if __name__ == "__main__":
    main()
