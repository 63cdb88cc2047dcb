"""The command `penstock sft`; `run` does the work."""

import typer

from penstock.runtime.imports import import_with_extra
from services.cli.arguments import RecipeArgument, ResumeOption, load_run, sort_arguments
from services.launch import gpu_plan, run_plan
from services.launch.checks import training_inputs
from services.launch.settings import hub_models, service_settings


def sft(
    context: typer.Context,
    recipe: RecipeArgument = None,
    resume: ResumeOption = None,
) -> int:
    """Train the recipe's model on the assistants' text in its data, with one process for each of trainer.ranks.

    Takes [sft], [data], [model], [trainer] and [trackers]; starts neither engines nor NATS. Any --section.key=value
    overrides the recipe. `penstock train recipe.toml --model.path=CHECKPOINT/model` continues from a checkpoint.
    """
    recipes, overrides = sort_arguments(recipe, context.args)
    settings, folder = load_run(recipes, overrides, resume=resume)
    training_inputs.require_supervised_without_model(settings)
    run_plan.assign_sft_gpus(settings.trainer, gpu_plan.find_gpus())  # before a download, on which it does not depend
    settings = hub_models.with_model(settings)
    service_settings.for_sft(settings)
    training = import_with_extra("services.cli.sft.run", "penstock sft", extra="trainer")
    code: int = training.train(settings, folder)
    return code
