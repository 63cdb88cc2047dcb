"""The real trainer around a simulated backend, as a process.

python -m bench.async_loop.trainer_process --config RECIPE --workload FILE --steps-file FILE
"""

import argparse
import sys
from pathlib import Path

import torch

from bench.async_loop.simulated_backend import SimulatedBackend
from bench.async_loop.workload import Workload
from penstock import config as configuration
from penstock.runtime import process
from penstock.runtime.security import Security
from penstock.telemetry import log
from services.launch.settings import service_settings
from services.recipe import Recipe
from services.trainer.main import serve


def main() -> int:
    """Train until the last step or a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--steps-file", type=Path, required=True)
    options = parser.parse_args()
    recipe = configuration.load(Recipe, [options.config])
    log.configure(recipe.log, service="trainer")
    torch.set_num_threads(1)
    backend = SimulatedBackend(recipe.trainer, Workload.read(options.workload), options.steps_file)
    settings = service_settings.for_trainer(recipe)
    return process.run(
        lambda stop: serve(settings, stop, security=Security.from_environment(), open_backend=lambda _: backend)
    )


if __name__ == "__main__":
    sys.exit(main())
