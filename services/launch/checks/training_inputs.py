"""Checks what training reads, as far as that needs no model."""

from penstock.errors import ConfigError
from services.recipe import Recipe
from services.trainer.checks.schedule import schedule_contradiction
from services.trainer.data.sources.files import require_files
from services.trainer.demonstrations.files import require_demonstrations
from services.trainer.evaluation.set_files import require_sets
from services.trainer.sft.config import require_meant
from services.trainer.telemetry.trackers import require_packages


def require_trainable_without_model(recipe: Recipe) -> None:
    """Check what of the trainer's inputs can be checked before its model is there.

    Raises:
        ConfigError: there is no data, the sampling cannot be trained on, the learning rate's schedule does not fit
            into the steps, or a tracker is not installed.
    """
    require_schedule(recipe)
    require_data_files(recipe, with_sets=recipe.evaluation.is_in_training, with_demonstrations=True)
    require_packages(recipe.trackers)
    recipe.sampling.require_trainable()


def require_supervised_without_model(recipe: Recipe) -> None:
    """Check what of the inputs of supervised training can be checked before its model is there.

    Raises:
        ConfigError: there is no data, a tracker is not installed, or a setting does not apply.
    """
    require_data_files(recipe, with_sets=recipe.sft.validate_every > 0)
    require_packages(recipe.trackers)
    require_meant(
        sft=recipe.sft,
        trainer=recipe.trainer,
        data=recipe.data,
        evaluation=recipe.evaluation,
        metrics=recipe.metrics,
    )


def require_schedule(recipe: Recipe) -> None:
    """Check that the learning rate's schedule fits into the steps.

    Also where the recipe has epochs of a supervised run, whose rows would decide on the steps.

    Raises:
        ConfigError: it does not.
    """
    trainer = recipe.trainer
    if reason := schedule_contradiction(trainer.optimizer, num_steps=trainer.num_steps):
        raise ConfigError(f"trainer.num_steps = {trainer.num_steps}: {reason}")


def require_data_files(recipe: Recipe, *, with_sets: bool, with_demonstrations: bool = False) -> None:
    """Check that there are data, and those of evaluation sets and demonstrations.

    Raises:
        ConfigError: there is no such file.
    """
    for source in recipe.data.by_name.values():
        require_files(source)
    if with_sets:
        require_sets(recipe.evaluation)
    if with_demonstrations and recipe.demonstrations is not None:
        require_demonstrations(recipe.demonstrations)
