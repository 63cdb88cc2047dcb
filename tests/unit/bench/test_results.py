"""`make results`: which runs it makes, and what it reads out of them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from bench.results import __main__ as results
from bench.results import plots, tables
from bench.results.experiments import BOUND, DEMO, EXPERIMENTS, NO_TIS, ROOT, SFT, SFT_THEN_GRPO, TIS, Experiment
from bench.results.page import write_page
from bench.results.reading import Run, read_run
from bench.results.running import MADE_FILE, command, is_complete, made_with, run
from penstock import config as configuration
from services.recipe import Recipe


def _evaluation(step: int, training: float, held_out: float, *, num_failed: int = 0) -> dict[str, Any]:
    """As a line of evaluations.jsonl; errors and pass@4 follow from the score."""
    sets = {
        name: {
            "num_failed_prompts": num_failed,
            "score": {"value": value, "standard_error": value / 10},
            "pass_at": {"1": {"value": value}, "4": {"value": value + 0.1}},
        }
        for name, value in (("geometry", training), ("held_out", held_out))
    }
    return {"step": step, "sets": sets}


def _run(reward: Callable[[int], float], scores: tuple[float, float, float, float], **changed: Any) -> Run:
    """A run of 30 steps with `reward` of each; training and held-out pictures before, then after."""
    rows = [
        {
            "step": step,
            "reward_mean": reward(step),
            "entropy": 1.0 if step <= 10 else 0.25,
            "sample_tokens_mean": 5.0,
            "dlogp_mean": 0.02,
            "dlogp_max_current": 1e-6 * step,
            "kl_k3": 0.001,
            "token_lag_mean": 0.5,
            "staleness_max": 1.0,
            "tis_capped_fraction": 0.125,
            "num_stale_groups": 1,
            "num_failed_groups": 2,
            "groups": [2 * step, 2 * step + 1],
            **changed,
        }
        for step in range(1, 31)
    ]
    before, after = _evaluation(0, *scores[:2]), _evaluation(30, *scores[2:])
    return Run(rows=rows, evaluations=[before, after], made={"date": "2026-01-01", "commit": "abc"})


def _rising(step: int) -> float:
    return 0.4 if step <= 10 else 0.9


def _cells(table: str) -> list[list[str]]:
    """The cells of each line below the head of a table."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def _settings(experiment: Experiment) -> Recipe:
    _, recipe, *overrides = experiment.arguments(Path("runs"))
    return configuration.load(Recipe, [ROOT / recipe], overrides)


def test_every_run_is_what_the_page_says_of_it() -> None:
    """Its recipe loads, and differs from the demo's in what its name says."""
    settings = {each.name: _settings(each) for each in EXPERIMENTS}
    assert len(settings) == len(EXPERIMENTS) == 7
    assert [settings[each.name].run.seed for each in DEMO] == [0, 1, 2]
    assert {settings[each.name].trainer.max_staleness for each in (*DEMO, SFT_THEN_GRPO)} == {1}
    assert {settings[each.name].algorithm.correction.kind for each in (*DEMO, SFT_THEN_GRPO, TIS)} == {"truncate"}
    assert settings[NO_TIS.name].algorithm.correction.kind == "none"
    differing = settings[NO_TIS.name].model_copy(
        update={"algorithm": settings[TIS.name].algorithm, "run": settings[TIS.name].run}
    )
    assert differing == settings[TIS.name]
    assert settings[TIS.name].trainer.max_staleness == BOUND == 4
    evaluated = [each.evaluation.at_start and each.evaluation.at_end for each in settings.values()]
    assert evaluated.count(False) == 1, "only supervised training has no engines to evaluate with"


def test_grpo_begins_where_supervised_training_ended() -> None:
    """With the checkpoint of its last step, also where both are shortened."""
    begun = {"model.path": "runs/sft/checkpoints/step-000100/model"}
    assert f"--model.path={begun['model.path']}" in SFT_THEN_GRPO.arguments(Path("runs"))
    assert "--model.path=runs/sft/checkpoints/step-000005/model" in SFT_THEN_GRPO.arguments(
        Path("runs"), shortened_to=5
    )
    assert "--trainer.num_steps=5" in SFT.arguments(Path("runs"), shortened_to=5)


def test_a_run_is_begun_then_continued_and_left_alone_when_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is written once all are complete, not before."""
    folder = tmp_path / "runs" / "results-5-steps"
    asked, pages = [], []

    def play(experiment: Experiment, runs: Path, *, shortened_to: int | None) -> int:
        asked.append(command(experiment, runs, shortened_to=shortened_to))
        (folder / experiment.name).mkdir(exist_ok=True)
        (folder / experiment.name / "config.toml").touch()
        if len(asked) == 2:
            return 130
        (folder / experiment.name / MADE_FILE).write_text("{}")
        return 0

    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "run", play)
    monkeypatch.setattr(results, "write_page", lambda runs, *_: pages.append(list(runs)))
    monkeypatch.chdir(tmp_path)
    first, second = (each.name for each in EXPERIMENTS[:2])
    monkeypatch.setattr("sys.argv", ["results", "--steps", "5", "--only", first, second])
    assert results.main() == 130
    assert not pages
    monkeypatch.setattr("sys.argv", ["results", "--steps", "5", "--only", second])
    assert results.main() == 0
    assert not pages
    monkeypatch.setattr("sys.argv", ["results", "--steps", "5"])
    assert results.main() == 0
    assert asked[0][:2] == ["train", "recipes/tiny-cpu.toml"]
    assert asked[2] == ["train", "--resume", f"runs/results-5-steps/{second}"]
    assert len(asked) == len(EXPERIMENTS) + 1, "the first and, once it had ended, the second were not run again"
    assert pages == [[each.name for each in EXPERIMENTS]]


def test_a_run_that_fails_is_not_complete(tmp_path: Path) -> None:
    """Its exit code is passed on, and it will be run again."""
    assert run(Experiment(name="one", command="sft", recipe="no-such.toml"), tmp_path, shortened_to=None) == 2
    assert not is_complete(tmp_path / "one")
    assert not (tmp_path / "one").exists()


def test_a_finished_run_is_read_back(tmp_path: Path) -> None:
    """Its steps, evaluations and what it was made with; what its command does not write is empty."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    (tmp_path / "evaluations.jsonl").write_text(json.dumps(_evaluation(2, 0.5, 0.4)) + "\n")
    (tmp_path / "run.commits").write_text("abc\ndef\nabc\n")
    (tmp_path / MADE_FILE).write_text(json.dumps(made_with(tmp_path / "run.commits")))
    found = read_run(tmp_path)
    assert [row["step"] for row in found.rows] == [1, 2]
    assert found.evaluation(2)["held_out"]["score"]["value"] == 0.4
    assert found.validations == []
    assert found.made["torch"]
    assert found.made["commit"] == "abc, def", "it was continued on another tree"
    with pytest.raises(LookupError, match="no evaluation of step 0"):
        found.first_and_last_evaluation()


def test_an_evaluation_that_lacks_prompts_makes_no_number() -> None:
    """The mean of the rest is not the set's score."""
    found = Run(rows=[], evaluations=[_evaluation(0, 0.5, 0.5, num_failed=3)])
    with pytest.raises(LookupError, match="'held_out': 3"):
        found.evaluation(0)


def test_the_demo_by_seed() -> None:
    """Means of the first and last ten steps, scores with their errors, and the spread over seeds."""
    runs = {0: _run(_rising, (0.4, 0.3, 0.9, 0.7)), 1: _run(lambda _: 0.5, (0.4, 0.3, 0.7, 0.9))}
    assert _cells(tables.demo_table(runs)) == [
        ["0", "0.400", "0.900", "0.400 ± 0.040", "0.900 ± 0.090", "0.300 ± 0.030", "0.700 ± 0.070"],
        ["1", "0.500", "0.500", "0.400 ± 0.040", "0.700 ± 0.070", "0.300 ± 0.030", "0.900 ± 0.090"],
        [
            "mean ± deviation of seeds",
            "0.450 ± 0.071", "0.700 ± 0.283", "0.400 ± 0.000", "0.800 ± 0.141", "0.300 ± 0.000", "0.800 ± 0.141",
        ],
    ]  # fmt: skip


def test_fidelity_counts_groups_that_were_trained_twice() -> None:
    """And takes the largest of differences, also where steps have none."""
    run = _run(_rising, (0.4, 0.3, 0.9, 0.7))
    run.rows[4]["groups"] = run.rows[3]["groups"]
    del run.rows[29]["dlogp_max_current"]
    (cells,) = _cells(tables.fidelity_table({7: run}))
    assert cells == ["7", "2.9e-05", "2.0e-02", "0.50", "1", "58", "1, 2, 2"]


def test_supervised_training_and_grpo_are_told_apart() -> None:
    """Each model has the evaluation that was made of it."""
    grpo, both = _run(_rising, (0.41, 0.31, 0.81, 0.71)), _run(_rising, (0.51, 0.42, 0.83, 0.74))
    assert [[cells[0], cells[1][:5], cells[2], cells[3][:5]] for cells in _cells(tables.sft_table(both, grpo))] == [
        ["the tiny model", "0.410", "0.510", "0.310"],
        ["after GRPO", "0.810", "0.910", "0.710"],
        ["after supervised training", "0.510", "0.610", "0.420"],
        ["after supervised training, then GRPO", "0.830", "0.930", "0.740"],
    ]


def test_what_the_correction_changes() -> None:
    """Reward, entropy and length at both ends, the fall, and the held-out score at the end. Rows of a run without a
    correction have no metrics of one."""
    collapsing = _run(lambda step: 0.8 if step <= 20 else 0.1, (0.4, 0.3, 0.2, 0.1))
    for row in collapsing.rows:
        del row["tis_capped_fraction"]
    runs = {"with": _run(_rising, (0.4, 0.3, 0.9, 0.7)), "without": collapsing}
    assert _cells(tables.correction_table(runs)) == [
        [
            "with", "0.50", "1", "0.400, 0.900", "1.000, 0.250", "5.000, 5.000", "0.000", "1.0e-03", "12.50%",
            "0.700 ± 0.070",
        ],
        [
            "without", "0.50", "1", "0.800, 0.100", "1.000, 0.250", "5.000, 5.000", "0.700", "1.0e-03", "no correction",
            "0.100 ± 0.010",
        ],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rewards", "fall"),
    [
        ([0.1 * step for step in range(30)], 0.0),
        ([0.0] * 10 + [1.0] * 10 + [0.5] * 10, 0.5),
        ([1.0] * 10 + [0.0] * 10 + [1.0] * 30, 1.0),
        ([0.5] * 20 + [0.0] + [0.5] * 20, 0.05),
        ([0.3], 0.0),
    ],
)
def test_the_largest_fall(rewards: list[float], fall: float) -> None:
    """Of means over ten steps: a collapse counts in full, also if the run recovers; one bad step hardly."""
    assert tables.largest_fall(rewards) == pytest.approx(fall)


def test_runs_of_other_commits_are_named() -> None:
    """One line where all are alike, else one for each tree; each with its runs' wall times, where rows have them."""
    rows = [{"step": step, "elapsed_s": 30.0 * step} for step in range(1, 4)]
    alike = {"a": Run(rows=rows, made={"commit": "abc"}), "b": Run(rows=[{"step": 1}], made={"commit": "abc"})}
    assert _cells(tables.machine_table(alike)) == [["all", "abc", "a 1.5, b unknown"]]
    mixed = {**alike, "c": Run(rows=rows[:2], made={"commit": "def"})}
    assert _cells(tables.machine_table(mixed)) == [["a, b", "abc", "a 1.5, b unknown"], ["c", "def", "c 1.0"]]


def test_smoothed_curves() -> None:
    """The mean of ten steps, of fewer at the beginning; steps without the metric are left out."""
    rows = [{"step": 1, "x": 0.0}, {"step": 2}, {"step": 3, "x": 3.0}]
    assert plots.curve(rows, "x", at_least=1.0) == ([1, 3], [1.0, 3.0])
    assert plots.smooth([0.0, 1.0, *[4.0] * 10])[::4] == [0.0, pytest.approx(13 / 5), pytest.approx(29 / 9)]
    assert plots.smooth([0.0, 1.0, *[4.0] * 10])[-1] == 4.0


@pytest.mark.leaves_behind("matplotlib keeps the fonts that it has read open", "descriptor")
def test_the_page_has_every_number_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No field is left open, each plot shows every run, and what the page says of the seeds is right."""
    figures: dict[str, Figure] = {}
    save = plots._save
    monkeypatch.setattr(plots, "_save", lambda figure, path: (figures.update({path.stem: figure}), save(figure, path)))
    runs = {each.name: _run(_rising, (0.4, 0.3, 0.9, 0.7)) for each in EXPERIMENTS}
    runs[DEMO[1].name] = _run(_rising, (0.4, 0.3, 0.8, 0.7))
    validations = [{"step": step, "validation_loss": loss} for step, loss in ((0, 0.25), (20, 0.125))]
    runs[SFT.name] = Run(
        rows=[{"step": step, "loss": 0.2} for step in range(1, 21)],
        validations=validations,
        made=runs[TIS.name].made,
    )
    (tmp_path / "images").mkdir()
    write_page(runs, tmp_path / "results.md", tmp_path / "images")
    page = (tmp_path / "results.md").read_text()
    assert not re.search(r"\{\w*\}", page)
    assert "is 0.250 before the first step and 0.125 after the last" in page
    assert "on training pictures by 0.467 ± 0.058, on held-out pictures by 0.400 ± 0.000: 86% of the rise" in page
    for experiment in EXPERIMENTS:
        assert f"    penstock {' '.join(experiment.arguments(Path('runs/results')))}\n" in page
    linked = re.findall(r"!\[.*\]\((.*)\)", page)
    assert len(linked) == 3
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in linked)
    shown = {
        stem: [[text.get_text() for text in axis.get_legend().get_texts()] for axis in figure.axes if axis.get_legend()]
        for stem, figure in figures.items()
    }
    assert shown["results-demo"][0] == ["seed 0", "seed 1", "seed 2"]
    assert shown["results-sft"] == [
        ["training", "held-out pictures"],
        ["from the supervised model", "from the tiny model"],
    ]
    assert shown["results-correction"] == [["bound 1, with", "bound 4, with", "bound 4, without"]]
    lines = {axis.get_ylabel(): len(axis.lines) for axis in figures["results-correction"].axes}
    assert list(lines.values()) == [6] * 4, "of each run every step and the mean, in every panel"
