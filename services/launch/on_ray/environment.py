"""The launcher's environment variables that hold on every host of the cluster."""

import os
from typing import Final

from penstock.runtime.security import VARIABLES, read_secret

GIVEN: Final = "PENSTOCK_"
"""How the names of variables begin that are the launcher's on every host: tokens."""
_DEFAULTS: Final = ("HF_", "NCCL_", "GLOO_", "SGLANG_", "WANDB_", "MLFLOW_", "OMP_NUM_THREADS")
"""Beginnings of those that are the launcher's where a host does not set them."""


def given() -> dict[str, str]:
    """Return the variables that every process gets from the launcher; a token's file is on this host only."""
    plain = {name: value for name, value in os.environ.items() if name.startswith(GIVEN) and name not in VARIABLES}
    secrets = {name: read_secret(name, os.environ) for name in VARIABLES if not name.endswith("_FILE")}
    return {**plain, **{name: secret for name, secret in secrets.items() if secret}}


def defaults() -> dict[str, str]:
    """Return the launcher's variables for hosts that do not set them themselves."""
    return {name: value for name, value in os.environ.items() if name.startswith(_DEFAULTS)}
