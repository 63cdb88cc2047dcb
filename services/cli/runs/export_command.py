"""`penstock export`: writes a trained model as a folder that other programs load."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from penstock.errors import ConfigError
from penstock.model import hub
from penstock.runtime.imports import import_with_extra
from services.cli.interruption import interruptible
from services.cli.model_folder import find_model_or_adapter, is_adapter_folder
from services.trainer.checkpoint.holding import held_model


class Precision(StrEnum):
    """Precision of exported weights."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


@interruptible()
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
    base: Annotated[
        Path | None,
        typer.Option(
            "--base",
            metavar="FOLDER|ID",
            help="Model that adapters were trained on, if it has moved.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Write the model of a run as a folder that transformers and SGLang load.

    A checkpoint has its weights in float32; published models have bfloat16, which takes half the space. Adapters of
    [trainer.lora] are merged into the model that the run began with.
    """
    model = find_model_or_adapter(source, step=step, name="RUN")
    with held_model(model):
        size_bytes = _write(model, target, dtype=dtype.value, base=base)
    sys.stdout.write(f"{target}: {model}, weights in {dtype.value}, {size_bytes / 2**20:,.1f} MiB\n")
    return 0


def _write(model: Path, target: Path, *, dtype: str, base: Path | None) -> int:
    """Write the model, or the adapters merged into `base`; return the size of the weights in bytes."""
    if is_adapter_folder(model):
        merging = import_with_extra("services.trainer.backend.files.merge_adapter", "penstock export", extra="trainer")
        base = None if base is None else hub.fetch(base, setting="--base")
        return int(merging.merge_adapter(model, target, dtype=dtype, base=base))
    if base is not None:
        raise ConfigError(f"--base {base}: {model} holds whole weights, not adapters; leave it out")
    casting = import_with_extra("services.trainer.backend.files.cast_model", "penstock export", extra="trainer")
    return int(casting.cast_model(model, target, dtype=dtype))
