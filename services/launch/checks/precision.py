"""Whether engines hold weights in the precision that the trainer pushes, before either is started."""

from penstock.errors import ConfigError
from penstock.model.precision import resolve_dtype
from services.recipe import Recipe


def require_same_precision(recipe: Recipe, *, has_gpus: bool) -> None:
    """Check that the engines of a training run take the trainer's pushes.

    Args:
        recipe: The recipe.
        has_gpus: Whether the run has GPUs. Then engines compute on them, and the trainer unless its device is cpu.

    Raises:
        ConfigError: engines would hold weights in another precision than the trainer pushes.
    """
    rollout, trainer = recipe.rollout, recipe.trainer
    held = resolve_dtype(rollout.dtype, on_gpu=has_gpus)
    pushed = resolve_dtype(trainer.dtype, on_gpu=has_gpus and trainer.device != "cpu")
    if held != pushed:
        raise ConfigError(
            f"with rollout.dtype = {rollout.dtype!r} engines hold {held}, and with trainer.dtype = {trainer.dtype!r} "
            f"the trainer pushes {pushed}, which they refuse; set both to 'bfloat16' or both to 'float32'"
        )
