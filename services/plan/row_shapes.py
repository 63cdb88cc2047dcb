"""The longest rows that a recipe's trainer computes."""

from services.plan.model_shape import ModelShape
from services.plan.working_memory import RowShape
from services.recipe import Recipe

PROMPT_SHARE = 0.25
"""Prompt's share of a row's tokens; more if the images need more, because they are in the prompt."""


def longest_sample(recipe: Recipe) -> tuple[int, bool]:
    """Return the tokens of the longest sample, and whether the recipe bounds it; if not, at least one turn's tokens."""
    limits = [source.limits.max_tokens for source in recipe.data.by_name.values()]
    bounds = [recipe.rollout.context_length, max(limits, default=0) if all(limits) else 0]
    if known := [bound for bound in bounds if bound]:
        return min(known), True
    return recipe.sampling.max_new_tokens, False


def longest_row(shape: ModelShape, recipe: Recipe, *, image_share: float) -> RowShape:
    """Return the longest row of a step: of micro_batch_tokens, or of a longer sample."""
    trainer = recipe.trainer
    return _row_of(
        shape,
        max(trainer.micro_batch_tokens, longest_sample(recipe)[0]),
        image_share=image_share,
        num_responses=trainer.samples_per_group,
        shares_prompt=trainer.share_prompts,
    )


def row_of_demonstrations(shape: ModelShape, recipe: Recipe, *, image_share: float) -> RowShape | None:
    """Return the longest row of demonstrations, which holds one; None if a step learns none."""
    if recipe.demonstrations is None:
        return None
    num_tokens = max(recipe.trainer.micro_batch_tokens, recipe.demonstrations.max_tokens)
    return _row_of(shape, num_tokens, image_share=image_share, num_responses=1, shares_prompt=False)


def _row_of(
    shape: ModelShape, num_tokens: int, *, image_share: float, num_responses: int, shares_prompt: bool
) -> RowShape:
    num_image_tokens = 0 if shape.vision is None else int(num_tokens * image_share)
    return RowShape(
        num_tokens=num_tokens,
        num_prompt_tokens=max(int(num_tokens * PROMPT_SHARE), num_image_tokens + 1),
        num_image_tokens=num_image_tokens,
        num_responses=num_responses,
        shares_prompt=shares_prompt,
    )
