"""Tables of docs/results.md: pure functions from runs to Markdown.

Every mean over steps is of the first or last `WINDOW` of them; the column of each ± says what it is.
"""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence

from bench.results.reading import Row, Run

WINDOW = 10
SETS = TRAINING, HELD_OUT = "geometry", "held_out"
"""Evaluation sets of recipes/tiny-cpu.toml."""


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, without a line break at its end."""
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for cells in rows:
        assert len(cells) == len(columns), (cells, columns)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def demo_table(runs: Mapping[int, Run]) -> str:
    """Return the demo's table by seed: reward, scores of both evaluation sets, and their spread over seeds."""
    rows, numbers = [], []
    for seed, run in runs.items():
        first, last = ends(run, "reward_mean")
        before, after = run.first_and_last_evaluation()
        scores = [_score(sets, name) for name in (TRAINING, HELD_OUT) for sets in (before, after)]
        rows.append([f"{seed}", f"{first:.3f}", f"{last:.3f}", *map(_with_error, scores)])
        numbers.append([first, last, *(value for value, _ in scores)])
    columns = list(zip(*numbers, strict=True))
    rows.append(["mean ± deviation of seeds", *(spread(column) for column in columns)])
    names = ("seed", "reward, first 10 steps", "last 10", "training pictures, before", "after", "held out, before")
    return markdown((*names, "after"), rows)


def fidelity_table(runs: Mapping[int, Run]) -> str:
    """Return the demo's table by seed: the distance between trainer and engine, and the outcomes of groups."""
    rows = []
    for seed, run in runs.items():
        trained = [index for row in run.rows for index in row["groups"]]
        last = run.rows[-1]
        rows.append([
            f"{seed}",
            f"{largest(run, 'dlogp_max_current'):.1e}",
            f"{mean(run, 'dlogp_mean'):.1e}",
            f"{mean(run, 'token_lag_mean'):.2f}",
            f"{largest(run, 'staleness_max'):g}",
            f"{len(set(trained)):,}",
            f"{last['num_stale_groups']}, {last['num_failed_groups']}, {len(trained) - len(set(trained))}",
        ])  # fmt: skip
    return markdown(
        (
            "seed", "largest difference, same version", "mean difference, all tokens", "mean versions behind",
            "oldest group", "groups trained", "stale, failed, trained twice",
        ),
        rows,
    )  # fmt: skip


def sft_table(sft_then_grpo: Run, grpo: Run) -> str:
    """Return the scores of the tiny model, after each kind of training, and after both.

    Args:
        sft_then_grpo: GRPO from the checkpoint of supervised training.
        grpo: GRPO from the tiny model, with the same seed.
    """
    tiny, after_grpo = grpo.first_and_last_evaluation()
    after_sft, after_both = sft_then_grpo.first_and_last_evaluation()
    models = {
        "the tiny model": tiny,
        "after GRPO": after_grpo,
        "after supervised training": after_sft,
        "after supervised training, then GRPO": after_both,
    }
    rows = [
        [
            name,
            *(cell for key in (TRAINING, HELD_OUT) for cell in (_with_error(_score(sets, key)), _pass_at(sets, key))),
        ]
        for name, sets in models.items()
    ]
    return markdown(("model", "training pictures", "pass@4", "held out", "pass@4"), rows)


def correction_table(runs: Mapping[str, Run]) -> str:
    """Return reward, entropy and length at the ends of each run, and its staleness and truncated tokens."""
    rows = []
    for name, run in runs.items():
        cells = [f"{mean(run, 'token_lag_mean'):.2f}", f"{largest(run, 'staleness_max'):g}"]
        for key in ("reward_mean", "entropy", "sample_tokens_mean"):
            first, last = ends(run, key)
            cells.append(f"{first:.3f}, {last:.3f}")
        fall = largest_fall([row["reward_mean"] for row in run.rows])
        _, after = run.first_and_last_evaluation()
        has_correction = any("tis_capped_fraction" in row for row in run.rows)
        capped = f"{mean(run, 'tis_capped_fraction'):.2%}" if has_correction else "no correction"
        cells += [f"{fall:.3f}", f"{mean(run, 'kl_k3'):.1e}", capped]
        rows.append([name, *cells, _with_error(_score(after, HELD_OUT))])
    return markdown(
        (
            "run", "mean versions behind", "oldest group", "reward, first and last 10 steps", "entropy, nats",
            "tokens of an answer", "largest fall of the reward", "k3 to the engine", "tokens at the bound of TIS",
            "held out, after",
        ),
        rows,
    )  # fmt: skip


def machine_table(runs: Mapping[str, Run]) -> str:
    """Return what the runs were made with, one row for each machine, commit, day and set of versions, and how many
    minutes each took, without the pauses between its starts."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, run in runs.items():
        groups.setdefault(tuple(run.made.items()), []).append(name)
    columns = list(next(iter(runs.values())).made)
    rows = [
        [
            "all" if len(groups) == 1 else ", ".join(names),
            *dict(made).values(),
            ", ".join(f"{name} {_minutes(runs[name])}" for name in names),
        ]
        for made, names in groups.items()
    ]
    return markdown(("runs", *columns, "minutes"), rows)


def ends(run: Run, key: str) -> tuple[float, float]:
    """Return the means of a metric over the first and the last steps that have it."""
    values = _values(run, key)
    return statistics.mean(values[:WINDOW]), statistics.mean(values[-WINDOW:])


def mean(run: Run, key: str) -> float:
    """Return the mean of a metric over the steps that have it."""
    return statistics.mean(_values(run, key))


def score_gain(run: Run, name: str) -> float:
    """Return the rise of the score on an evaluation set from before the first step to after the last."""
    before, after = (_score(sets, name)[0] for sets in run.first_and_last_evaluation())
    return after - before


def largest(run: Run, key: str) -> float:
    """Return the largest value of a metric."""
    return max(_values(run, key))


def largest_fall(values: Sequence[float]) -> float:
    """Return the largest fall of the mean of `WINDOW` steps in a row below an earlier such mean; 0 if it never fell.

    A run that collapses falls by most of its gain; one that learns falls by noise.
    """
    width = min(WINDOW, len(values))
    means = [statistics.mean(values[end - width : end]) for end in range(width, len(values) + 1)]
    return max(best - now for best, now in zip(itertools.accumulate(means, max), means, strict=True))


def _minutes(run: Run) -> str:
    elapsed = _values(run, "elapsed_s")
    return f"{elapsed[-1] / 60:.1f}" if elapsed else "unknown"


def _values(run: Run, key: str) -> list[float]:
    return [float(row[key]) for row in run.rows if key in row]


def _score(sets: Row, name: str) -> tuple[float, float]:
    score = sets[name]["score"]
    return score["value"], score["standard_error"]


def _with_error(score: tuple[float, float]) -> str:
    return f"{score[0]:.3f} ± {score[1]:.3f}"


def _pass_at(sets: Row, name: str) -> str:
    return f"{sets[name]['pass_at']['4']['value']:.3f}"


def spread(values: Sequence[float]) -> str:
    """Return the mean and the standard deviation (n - 1) as text."""
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"
