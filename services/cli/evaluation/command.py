"""The command `penstock eval`; `run` does the work."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.model import hub
from penstock.runtime.imports import import_with_extra
from penstock.runtime.security import Security
from services.cli.arguments import RecipeArgument, load_run, sort_arguments
from services.cli.model_folder import find_model
from services.launch.settings import hub_models
from services.trainer.checkpoint.holding import held_model


def eval_(
    context: typer.Context,
    recipe: RecipeArgument = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="FOLDER|ID",
            help="Model, checkpoint, run, or model on the Hugging Face Hub; default: the recipe's model.",
        ),
    ] = None,
    url: Annotated[
        str, typer.Option("--url", metavar="URL", help="OpenAI-compatible API instead, http://host:port/v1.")
    ] = "",
    url_model: Annotated[
        str, typer.Option("--url-model", metavar="NAME", help="Model at --url; default: the only one.")
    ] = "",
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="RUN_FOLDER", help="Play what the evaluation in this folder still lacks."),
    ] = None,
) -> int:
    """Play the recipe's evaluation sets with a model, and print and store the results.

    Starts engines, router, reward service and worker on this machine; with --url only the reward service. The API's key
    is read from OPENAI_API_KEY. Any --section.key=value overrides the recipe. Exits with 1 if a prompt could not be
    played.
    """
    from services.launch import serving

    recipes, overrides = sort_arguments(recipe, context.args)
    settings, folder = load_run(recipes, overrides, resume=resume)
    if resume is not None and (model is not None or url or url_model):
        given = next(name for name, value in (("--model", model), ("--url", url), ("--url-model", url_model)) if value)
        raise ConfigError(f"--resume {resume} goes on with the model that it was begun with; leave out {given}")
    if url and model is not None:
        raise ConfigError(f"--url {url} and --model {model} exclude each other; leave out one")
    if url_model and not url:
        raise ConfigError(f"--url-model {url_model} needs --url; for a model on this machine give --model")
    if not settings.evaluation.sets:
        raise ConfigError(
            "the recipe has no evaluation set; add one, for example [evaluation.sets.test] with split = 'test' "
            "(docs/training/evaluation.md)"
        )
    evaluating = import_with_extra("services.cli.evaluation.run", "penstock eval", extra="trainer")
    is_over_api = bool(url) or (folder is not None and evaluating.is_over_api(folder))
    security = Security.load(settings.security)
    plan = None if is_over_api else serving.plan_serving(settings)  # before a download, on which it does not depend
    if model is not None:
        folder_of_model = find_model(model) if hub.parse_id(model) is None else hub.fetch(model, setting="--model")
        settings = settings.model_copy(update={"model": ModelConfig(path=folder_of_model)})
    elif not is_over_api:
        settings = hub_models.with_model(settings)
    with nullcontext() if settings.model is None or is_over_api else held_model(settings.model.path):
        code: int = evaluating.evaluate(settings, security, plan, url=url, url_model=url_model, folder=folder)
    return code
