"""Writes docs/results.md: the words of page.md, with numbers, tables and commands from the runs."""

import statistics
from collections.abc import Mapping
from pathlib import Path

from bench.results import plots, tables
from bench.results.experiments import BOUND, DEMO, EXPERIMENTS, NO_TIS, SEEDS, SFT, SFT_THEN_GRPO, TIS, Experiment
from bench.results.reading import Run

_RUNS = Path("runs/results")
"""Path in the page's commands."""

_PAGE = Path(__file__).with_name("page.md")


def write_page(runs: Mapping[str, Run], page: Path, images: Path) -> None:
    """Write the page with its plots.

    Args:
        runs: Every experiment's run, by name.
        page: The file to write.
        images: An existing folder for the plots, below that of the page.
    """
    demo = {seed: runs[experiment.name] for seed, experiment in zip(SEEDS, DEMO, strict=True)}
    corrected = {
        "bound 1, with": runs[DEMO[0].name],
        f"bound {BOUND}, with": runs[TIS.name],
        f"bound {BOUND}, without": runs[NO_TIS.name],
    }
    sft, both = runs[SFT.name], runs[SFT_THEN_GRPO.name]
    plots.draw_demo(demo, images / "results-demo.png")
    plots.draw_sft(sft, both, demo[SEEDS[0]], images / "results-sft.png")
    plots.draw_correction(corrected, images / "results-correction.png")

    rewards = [tables.ends(run, "reward_mean") for run in demo.values()]
    gains = {name: [tables.score_gain(run, name) for run in demo.values()] for name in tables.SETS}
    training, held_out = gains[tables.TRAINING], gains[tables.HELD_OUT]
    page.write_text(
        _PAGE.read_text().format(
            num_runs=len(EXPERIMENTS),
            bound=BOUND,
            window=tables.WINDOW,
            images=images.relative_to(page.parent),
            demo_commands=_commands(*DEMO),
            demo_table=tables.demo_table(demo),
            fidelity_table=tables.fidelity_table(demo),
            gain=tables.spread([last - first for first, last in rewards]),
            training_gain=tables.spread(training),
            held_out_gain=tables.spread(held_out),
            carried=statistics.mean(held_out) / statistics.mean(training),
            sft_commands=_commands(SFT, SFT_THEN_GRPO),
            loss_before=sft.validations[0]["validation_loss"],
            loss_after=sft.validations[-1]["validation_loss"],
            sft_table=tables.sft_table(both, demo[SEEDS[0]]),
            correction_commands=_commands(TIS, NO_TIS),
            correction_table=tables.correction_table(corrected),
            seed_range=max(last for _, last in rewards) - min(last for _, last in rewards),
            machine_table=tables.machine_table(runs),
        )
    )


def _commands(*experiments: Experiment) -> str:
    lines = (f"    penstock {' '.join(experiment.arguments(_RUNS))}" for experiment in experiments)
    return "\n".join(lines)
