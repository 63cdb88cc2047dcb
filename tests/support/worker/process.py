"""A worker in a process of its own, to be killed: `python -m tests.support.worker.process recipe.json`."""

import sys
from pathlib import Path

from penstock.runtime.process import run
from penstock.runtime.security import Security
from services.launch.settings import service_settings
from services.recipe import Recipe
from services.rollout.worker.main import serve

if __name__ == "__main__":
    settings = service_settings.for_worker(Recipe.model_validate_json(Path(sys.argv[1]).read_text()))
    sys.exit(run(lambda stop: serve(settings, stop, security=Security())))
