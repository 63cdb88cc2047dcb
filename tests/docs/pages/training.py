"""docs/training."""

from tests.docs.pages.reasons import GPUS, HUB, LAYOUT
from tests.docs.steps import Given, NotRun, Page, Run, Save, Shows

_FEW = "--evaluation.sets.geometry.num_prompts=8 --evaluation.sets.held_out.num_prompts=8"
_RECORDED = "--trainer.num_steps=4 --trainer.record_groups=true --run.folder=runs/recorded"

PAGES = (
    Page(
        "docs/training/adapters.md",
        Save("[trainer.lora]", "adapters.toml"),
        Given("penstock train tiny-cpu adapters.toml --trainer.num_steps=2 --run.folder=runs/my-run"),
        Run("penstock export"),
        instead={"trained --base=/models/Qwen3-VL-8B-Instruct": "moved --base=models/tiny-qwen3-vl"},
    ),
    Page(
        "docs/training/algorithms.md",
        Given(f"penstock train tiny-cpu {_RECORDED}"),
        Run("penstock replay"),
        NotRun("r = exp", "a formula"),
        Run("penstock replay"),
        Run("PYTHONPATH=examples/algorithm penstock train"),
        instead={"RUN": "runs/recorded", "--step 12": "--step 3", "RECIPE": "tiny-cpu --trainer.num_steps=3"},
    ),
    Page(
        "docs/training/data.md",
        Given("python -m tests.docs.rows large.parquet"),
        Given("penstock init tiny-cpu recipe.toml"),
        Given("sed -i 's|^\\[data]|[data]\\npath = \"large.parquet\"|' recipe.toml"),
        Run("penstock data"),
        Run("import pyarrow"),
    ),
    Page(
        "docs/training/evaluation.md",
        Given("penstock train tiny-cpu --trainer.num_steps=2 --run.folder=runs/trained"),
        Run(
            "penstock eval",
            left_out={
                f"penstock eval recipes/tiny-cpu.toml {_FEW} --model Qwen": HUB,
                f"penstock eval recipes/tiny-cpu.toml {_FEW} --url": "needs a model that serves: "
                "tests/integration/evaluation/test_evaluation_over_api.py has one",
            },
        ),
        Run("penstock eval --resume"),
        Shows("set  "),
        NotRun("pip install lmms-eval", "needs lmms-eval: `make test-lmms-eval` plays the page's task"),
        instead={
            "penstock eval recipes/tiny-cpu.toml": f"penstock eval recipes/tiny-cpu.toml {_FEW}",
            "runs/tiny-cpu-<time>": "runs/trained",
            "runs/.../checkpoints/step-000250": "runs/trained/checkpoints/step-000002",
            "runs/tiny-cpu-eval-<time>": "$(ls -d runs/tiny-cpu-eval-* | tail -1)",
        },
    ),
    Page(
        "docs/training/many-ranks.md", NotRun("torchrun", f"{GPUS} and hosts: tests/e2e/test_torchrun.py has two ranks")
    ),
    Page(
        "docs/training/models.md",
        Run("penstock plan"),
        instead={"models/Qwen3-VL-8B-Instruct": "models/tiny-qwen3-vl"},
    ),
    Page(
        "docs/training/recipes.md",
        NotRun("penstock train slime-geo3k-grpo --model.path", f"{GPUS}, and {HUB}"),
        Run("penstock plan"),
        Given("python -m tests.docs.rows train.parquet test.parquet"),
        Run("penstock train slime-geo3k-grpo cut-to-size"),
        NotRun("make recipes", "the command itself, for minutes each"),
        instead={"Qwen/Qwen3-VL-8B-Instruct": "models/tiny-qwen3-vl"},
    ),
    Page(
        "docs/training/replay.md",
        Run("penstock train"),
        Run(
            "penstock replay",
            left_out={
                "penstock replay .* --demonstrations": "the run has none: "
                "tests/integration/trainer/replay/test_replay_of_demonstrations.py has such a run"
            },
        ),
        Run("penstock replay"),
        NotRun("groups/step-000012", LAYOUT),
        instead={
            "--trainer.record_groups=true": _RECORDED,
            "runs/tiny-cpu-20260101-120000": "runs/recorded",
            # By the third step all groups are stale.
            "RUN --step 12 --trainer.max_staleness=0": "RUN --step 1 --trainer.max_staleness=0",
            "RUN": "runs/recorded",
            "--step 12": "--step 3",
        },
    ),
    Page(
        "docs/training/sft.md",
        Run("penstock sft"),
        instead={
            "penstock sft recipes/tiny-sft-cpu.toml": "penstock sft recipes/tiny-sft-cpu.toml --trainer.num_steps=4 "
            "--trainer.optimizer.warmup_steps=0 --run.folder=runs/tiny-sft",
            "--resume runs/tiny-sft-cpu-<start>": "--resume runs/tiny-sft --trainer.num_steps=6",
            "step-000100/model": "step-000006/model --trainer.num_steps=3",
            "runs/tiny-sft-cpu-<start>": "runs/tiny-sft",
            "penstock eval recipes/tiny-sft-cpu.toml": "penstock eval recipes/tiny-sft-cpu.toml "
            "--evaluation.sets.held_out.num_prompts=8",
        },
    ),
)
