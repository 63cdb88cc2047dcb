"""`penstock plan`: calculates whether a recipe fits the memory of GPUs, which need not be present, and the host's."""

import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from penstock.errors import ConfigError
from penstock.model import hub
from penstock.runtime.imports import import_with_extra
from services.cli.arguments import RecipeArgument, load_recipes, sort_arguments

_GIB = 2**30
_WIDTH = 52
_MOST_IMAGES = 0.9


def plan(
    context: typer.Context,
    recipe: RecipeArgument = None,
    gpus: Annotated[
        str, typer.Option("--gpus", metavar="NxGIB", help="GPUs of the machine and the memory of each: 8x80.")
    ] = "8x80",
    image_share: Annotated[float, typer.Option("--image-share", help="Share of tokens that stand for images.")] = 0.25,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as one JSON object.")] = False,
) -> int:
    """Calculate the memory that engines and trainer take of GPUs and host, and settings with which they fit the GPUs.

    Reads only the model's config.json, and uses no GPU; the weights of a model on the Hugging Face Hub are not
    downloaded. Any --section.key=value overrides the recipe. Exits with 1 if something does not fit.
    """
    recipes, overrides = sort_arguments(recipe, context.args)
    settings = load_recipes(recipes, overrides)
    if settings.model is None:
        raise ConfigError("section [model] is missing; give --model.path=, or add it to the recipe")
    if not 0 <= image_share <= _MOST_IMAGES:  # also rejects nan
        raise ConfigError(f"--image-share {image_share} is no share of 0 to {_MOST_IMAGES}; correct it")
    planning: Any = import_with_extra("services.plan.memory_plan", "penstock plan", extra="trainer")
    machine = planning.Gpus.parse(gpus)
    model = hub.fetch(settings.model.path, with_weights=False)
    found = planning.plan_memory(model, settings, machine, image_share=image_share)
    if as_json:
        sys.stdout.write(json.dumps(_as_json(found), indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(_lines(found, machine)) + "\n")
    return 0 if found.fits else 1


def _lines(found: Any, machine: Any) -> Iterator[str]:
    shape = found.shape
    millions = f"{shape.num_parameters / 1e6:,.1f} million parameters"
    active = "" if shape.num_active == shape.num_parameters else f", {shape.num_active / 1e6:,.1f} of them for a token"
    yield f"{shape.config.model_type}: {millions}{active}, {shape.num_layers} layers"
    yield f"{machine.count} GPUs with {machine.total_bytes / _GIB:g} GiB each"
    for process in found.processes:
        yield ""
        yield f"{process.name}{'' if process.count == 1 else f' ({process.count} of them)'}"
        for moment in process.moments:
            yield from _parts(moment)
            room = process.room_of(moment)
            verdict = "" if moment.total_bytes <= room else "  TOO MUCH"
            yield f"    {'together':<{_WIDTH}}{moment.total_bytes / _GIB:8.1f} of {room / _GIB:.1f}{verdict}"
        yield from (f"  {note}" for note in process.notes)
    yield ""
    yield "the host's memory, all processes together"
    for moment in found.host:
        yield from _parts(moment)
        yield f"    {'together':<{_WIDTH}}{moment.total_bytes / _GIB:8.1f} GiB"
    yield ""
    if found.fits:
        needed = max(moment.total_bytes for moment in found.host)
        yield f"it fits these GPUs, if the host has {needed / _GIB:,.1f} GiB of memory"
    elif found.remedy:
        yield f"it does not fit; it would with {' '.join(found.remedy)}"
    else:
        yield "it does not fit, and none of the settings that were tried helps; take more or larger GPUs"


def _parts(moment: Any) -> Iterator[str]:
    yield f"  {moment.name}"
    for part in moment.parts:
        yield f"    {part.name:<{_WIDTH}}{part.size_bytes / _GIB:8.1f} GiB"


def _as_json(found: Any) -> dict[str, Any]:
    return {
        "num_parameters": found.shape.num_parameters,
        "fits": found.fits,
        "remedy": None if found.remedy is None else list(found.remedy),
        "processes": [
            {
                "name": process.name,
                "count": process.count,
                "room_bytes": process.room_bytes,
                "moments": [
                    _moment_as_json(moment) | {"room_bytes": process.room_of(moment)} for moment in process.moments
                ],
                "notes": list(process.notes),
            }
            for process in found.processes
        ],
        "host": [_moment_as_json(moment) for moment in found.host],
    }


def _moment_as_json(moment: Any) -> dict[str, Any]:
    return {"name": moment.name, "bytes": {part.name: part.size_bytes for part in moment.parts}}
