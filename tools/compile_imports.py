"""Import once what the services import, so that Python keeps the compiled modules; `make setup` ends with it.

Without the compiled modules, every process of every run compiles SGLang, torch and transformers anew: 11 of the 20
CPU-seconds that an engine's imports take. PYTHONDONTWRITEBYTECODE, which many containers set, would keep Python from
storing them; this program disregards it.
"""

import importlib
import os
import sys

MODULES = (
    "services.reward.server",
    "services.reward.worker_tasks.perform",
    "services.router.server",
    "services.trainer.main",
    "services.rollout.worker.main",
    "services.rollout.engine.server",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.qwen3_vl",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "transformers.models.qwen3_vl.processing_qwen3_vl",
    "matplotlib.pyplot",
    "pytest",
)


def main() -> int:
    """Return 0; a module that cannot be imported is a broken installation and raises."""
    sys.dont_write_bytecode = False
    os.environ.update(OMP_NUM_THREADS="1", SGLANG_EXTERNAL_MODEL_PACKAGE="services.rollout.engine.sglang_plugin.models")
    for name in MODULES:
        importlib.import_module(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
