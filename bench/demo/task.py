"""The demo's task as a file that another framework can read: rows in the run's order, batch, sampling and optimizer."""

import json
from pathlib import Path

from penstock.model.tokens import forbidden_token_ids
from penstock.records import TextPart
from services.recipe import Recipe
from services.trainer.data.dataset import open_dataset


def write_task(folder: Path, recipe: Recipe, *, target: float, window: int) -> Path:
    """Write the task of `recipe` below `folder`; return its file.

    Args:
        folder: Destination of the file and the pictures.
        recipe: A run on built-in problems, with one picture and one correct answer each.
        target: Mean reward at which the run may end.
        window: Steps over which that mean is taken.
    """
    trainer, optimizer = recipe.trainer, recipe.trainer.optimizer
    dataset = open_dataset(recipe.data, seed=recipe.run.seed)
    rows = []
    for position in range(trainer.num_steps * trainer.groups_per_step):
        example = dataset[position]
        (image,), (gold,) = example.images, example.golds
        name = f"{position}.png"
        (folder / name).write_bytes(image)
        (message,) = example.messages
        text = "".join(part.text for part in message.parts if isinstance(part, TextPart))
        rows.append({"text": text, "image": name, "gold": gold})
    task = {
        "model": str(recipe.model.path.absolute()),
        "num_steps": trainer.num_steps,
        "groups_per_step": trainer.groups_per_step,
        "samples_per_group": trainer.samples_per_group,
        "temperature": recipe.sampling.temperature,
        "max_new_tokens": recipe.sampling.max_new_tokens,
        "forbidden_ids": forbidden_token_ids(recipe.model.path),
        "learning_rate": optimizer.learning_rate,
        "betas": optimizer.betas,
        "warmup_steps": optimizer.warmup_steps,
        "grad_clip": optimizer.grad_clip,
        "target": target,
        "window": window,
        "rows": rows,
    }
    file = folder / "task.json"
    file.write_text(json.dumps(task))
    return file
