"""The runs behind docs/results.md, each as a person would type it: a recipe and its overrides."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock import config as configuration
from services.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (0, 1, 2)
"""Seeds of the demo."""
BOUND = 4
"""`trainer.max_staleness` of the runs with and without importance sampling."""

_EVALUATED = ("--evaluation.at_start=true", "--evaluation.at_end=true")
_STALE = (f"--trainer.max_staleness={BOUND}", *_EVALUATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One run."""

    name: str
    """Name of its folder below the results folder."""
    command: Literal["train", "sft"]
    recipe: str
    """Path from the repository's root."""
    overrides: tuple[str, ...] = ()
    """`--section.key=value`."""
    starts_from: str | None = None
    """The experiment whose last checkpoint it begins with; None: the recipe's model."""

    def model(self, runs: Path, *, shortened_to: int | None = None) -> Path:
        """Return the folder of the model that its run below `runs` ends with."""
        num_steps = shortened_to or configuration.load(Recipe, [ROOT / self.recipe]).trainer.num_steps
        return runs / self.name / "checkpoints" / f"step-{num_steps:06d}" / "model"

    def arguments(self, runs: Path, *, shortened_to: int | None = None) -> list[str]:
        """Return the arguments of `penstock` that begin it below the folder `runs`.

        Args:
            runs: Folder of all experiments' folders.
            shortened_to: Steps, without warm-up, instead of the recipe's.
        """
        given = [self.command, self.recipe, f"--run.folder={runs / self.name}", *self.overrides]
        if self.starts_from is not None:
            given.append(f"--model.path={by_name(self.starts_from).model(runs, shortened_to=shortened_to)}")
        if shortened_to is not None:
            given += [f"--trainer.num_steps={shortened_to}", "--trainer.optimizer.warmup_steps=0"]
        return given


def _demo(name: str, *overrides: str, starts_from: str | None = None) -> Experiment:
    return Experiment(
        name=name, command="train", recipe="recipes/tiny-cpu.toml", overrides=overrides, starts_from=starts_from
    )


DEMO = tuple(_demo(f"demo-seed-{seed}", f"--run.seed={seed}", *_EVALUATED) for seed in SEEDS)
SFT = Experiment(name="sft", command="sft", recipe="recipes/tiny-sft-cpu.toml")
SFT_THEN_GRPO = _demo("sft-then-grpo", *_EVALUATED, starts_from=SFT.name)
TIS = _demo(f"bound-{BOUND}-tis", *_STALE)
NO_TIS = _demo(f"bound-{BOUND}-no-tis", *_STALE, "--algorithm.correction.kind=none")

EXPERIMENTS: Sequence[Experiment] = (*DEMO, SFT, SFT_THEN_GRPO, TIS, NO_TIS)
"""All experiments, in the order in which they run."""


def by_name(name: str) -> Experiment:
    """Return the experiment of that name.

    Raises:
        KeyError: there is none.
    """
    return {experiment.name: experiment for experiment in EXPERIMENTS}[name]
