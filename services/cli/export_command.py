"""`penstock export`: writes a trained model as a folder that other programs load."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from services.cli.extras import import_with_extra
from services.cli.model_folder import find_model


class Precision(StrEnum):
    """Precision of exported weights."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


def export(
    source: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Run folder, a checkpoint of it, or a model folder.", show_default=False),
    ],
    target: Annotated[Path, typer.Argument(metavar="FOLDER", help="Model folder to make.", show_default=False)],
    step: Annotated[
        int | None, typer.Option("--step", help="Optimizer step; default: the newest checkpoint.", min=1)
    ] = None,
    dtype: Annotated[Precision, typer.Option("--dtype", help="Precision of the weights.")] = Precision.BFLOAT16,
) -> int:
    """Write the model of a run as a folder that transformers and SGLang load.

    A checkpoint has its weights in float32; published models have bfloat16, which takes half the space.
    """
    model = find_model(source, step=step, name="RUN")
    casting = import_with_extra("services.trainer.backend.files.cast_model", "penstock export", extra="trainer")
    size_bytes = casting.cast_model(model, target, dtype=dtype.value)
    sys.stdout.write(f"{target}: {model}, weights in {dtype.value}, {size_bytes / 2**20:,.1f} MiB\n")
    return 0
