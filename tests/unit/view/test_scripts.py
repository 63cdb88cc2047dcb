"""The logic of the pages, which is tested in a browser by `make test-browser` too."""

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from services.trainer.telemetry.episodes.files import EpisodeFiles
from services.view.app import view_app
from services.view.episode_query import EpisodeQuery
from services.view.export.excerpt import excerpt_of
from services.view.run_reader import RunReader
from tests.support.view_runs import add_group, column, make_run, write_rows
from tests.support.view_scripts import ViewScripts


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunReader:
    """Groups that differ in everything that can be asked for."""
    folder = make_run(tmp_path_factory.mktemp("run"), num_steps=3)
    files = EpisodeFiles(folder / "episodes", last_step=9, max_bytes=1e9)
    long = f"{'so ' * 500} at the END"
    add_group(files, step=4, index=0, rewards=(1.0, 1.0), dlogp=1e-6, text=long)
    add_group(files, step=4, index=7, rewards=(1.0, 0.0), dlogp=1e-2, prompt="What is the AREA?", num_tokens=9)
    add_group(files, step=5, index=3, rewards=(None, None), outcome="failed", reason="the environment broke")
    add_group(files, step=6, index=4, rewards=(None, 0.5), dlogp=1e-4, outcome="stale", source="eval/x")
    add_group(files, step=6, index=5, rewards=(1.0, 0.0, 1.0))
    return RunReader(folder)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        *(
            {"sort": sort, "descending": way}
            for sort in ("reward", "lowest", "dlogp", "lag", "index")
            for way in (True, False)
        ),
        *({"sort": sort} for sort in ("spread", "tokens", "turns")),
        {"step": 4},
        {"outcome": "stale"},
        {"row": "/0"},
        {"finish": "length"},
        {"text": "END so"},
        {"text": "area"},
        {"text": "nowhere"},
    ],
    ids=str,
)
def test_an_exported_page_finds_what_the_server_finds(run: RunReader, asked: dict[str, Any]) -> None:
    """In the same order; the page has its own filter, because it has no server."""
    excerpt = excerpt_of(0, run, max_bytes=10**7)
    data = msgspec.json.decode(msgspec.json.encode({"exported": "now", "runs": [{**excerpt.data, "left_out": []}]}))
    parameters = {key: str(value).lower() if isinstance(value, bool) else value for key, value in asked.items()}
    found = ViewScripts(data).call("exported.js", "exported.get", "api/runs/0/episodes", parameters)
    index, expected = run.find_episodes(EpisodeQuery(**asked))
    assert [each["number"] for each in found["found"]] == [index[place]["number"] for place in expected.places]
    assert (found["num_found"], found["num_kept"]) == (len(expected.places), len(index))


def test_tokens_have_the_numbers_of_their_columns(scripts: ViewScripts) -> None:
    """Columns cover the policy's own tokens only; what the environment or the prompt says has none."""
    sequence = {
        "token_ids": column([5, 6, 7, 8], "<i4"),
        "texts": ["a", "b", "c", "d"],
        "own": column([1, 0, 1, 1], "u1"),
        "versions": [[1, 3], [2, 4]],
        "engine_logprobs": column([-1.0, -2.0, -3.0]),
        "logprobs": column([-1.5, -2.0, -2.5]),
        "ratio": column([1.0, 0.5, 2.0]),
        "correction": column([1.0, 1.0, 1.0]),
        "advantages": column([0.25, 0.25, 0.25]),
        "trained": column([1, 0, 1], "u1"),
    }
    prompt = {"token_ids": column([1], "<i4"), "texts": ["<|im_start|>"]}
    tokens = scripts.call("tokens.js", "readTokens", prompt, sequence, 5)
    assert [(each["text"], each["id"], each["own"]) for each in tokens] == [
        ("<|im_start|>", 1, False),
        ("a", 5, True),
        ("b", 6, False),
        ("c", 7, True),
        ("d", 8, True),
    ]
    assert [each["dlogp"] for each in tokens] == [None, -0.5, None, 0.0, 0.5]
    assert [each["lag"] for each in tokens] == [None, 2, None, 1, 1]
    assert [each["trained"] for each in tokens] == [None, True, None, False, True]
    assert [each["ratio"] for each in tokens] == [None, 1.0, None, 0.5, 2.0]
    assert {each["entropy"] for each in tokens} == {None}
    untrained = {key: sequence[key] for key in ("token_ids", "texts", "own", "versions", "engine_logprobs")}
    assert {each["dlogp"] for each in scripts.call("tokens.js", "readTokens", prompt, untrained, 5)} == {None}


def test_a_page_reads_the_steps_of_a_very_long_run(tmp_path: Path) -> None:
    """More than a function takes as arguments. Steps that replace them are shown when all have come, not before."""
    client = TestClient(view_app([RunReader(tmp_path)]))
    scripts = ViewScripts(answer=lambda path: client.get(path).text)
    scripts.run("globalThis.steps = new (load('api.js').Steps)(0)")
    polled = """
        const meanwhile = [];
        const { fetch } = globalThis;
        globalThis.fetch = (path) => { meanwhile.push(steps.rows.length); return fetch(path); };
        const isNew = await steps.poll();
        globalThis.fetch = fetch;
        return [isNew, [...new Set(meanwhile)], steps.rows.length, steps.rows.at(-1)?.step];
    """
    assert scripts.run(polled) == [False, [0], 0, None]
    write_rows(tmp_path, [{"step": step} for step in range(130_000)])
    assert scripts.run(polled) == [True, [0], 130_000, 129_999]
    assert scripts.run(polled) == [False, [130_000], 130_000, 129_999]
    write_rows(tmp_path / "new", [{"step": step} for step in range(5001)])
    (tmp_path / "new" / "metrics.jsonl").replace(tmp_path / "metrics.jsonl")
    assert scripts.run(polled) == [True, [130_000], 5001, 5000]


@pytest.mark.parametrize(
    ("asked", "opened"),
    [
        ({"sort": "lowest", "descending": "false"}, {"sample": 2}),
        ({"sort": "lowest", "descending": ""}, {"sample": 2}),
        ({"sort": "reward", "descending": "false"}, {"sample": 2}),
        ({"sort": "reward", "descending": ""}, {"sample": 1}),
        ({"sort": "dlogp", "descending": ""}, {"at": "difference"}),
        ({"sort": "", "descending": ""}, {}),
    ],
    ids=str,
)
def test_a_group_opens_at_what_the_list_was_sorted_for(
    scripts: ViewScripts, asked: dict[str, str], opened: dict[str, Any]
) -> None:
    """The worst or the best of the samples that were judged, or the token that differs most."""
    assert scripts.call("pages/samples.js", "within", {"rewards": [None, 1.0, 0.0, 0.5]}, asked) == opened
    unjudged = scripts.call("pages/samples.js", "within", {"rewards": [None, None]}, asked)
    assert unjudged == (opened if "at" in opened else {})


def test_the_worst_samples_of_a_step_are_those_that_it_trained(tmp_path: Path) -> None:
    """Groups that a filter left out before it, and answers that its weights gave to an evaluation, have its number."""
    folder = make_run(tmp_path, num_steps=3)
    files = EpisodeFiles(folder / "episodes", last_step=3, max_bytes=1e9)
    add_group(files, step=3, index=20, rewards=(0.0, 0.25))
    add_group(files, step=3, index=21, rewards=(0.0, 0.0), outcome="filtered")
    add_group(files, step=3, index=22, rewards=(0.0, 0.0), outcome="evaluated", source="eval/held_out")
    asked = ViewScripts().run("""
        document.createElement = () => ({ setAttribute() {}, append() {} });
        const asked = [];
        load("pages/curves.js").linksOf({ link: (page, parameters) => { asked.push(parameters); } }, 3);
        return asked;
    """)
    found = TestClient(view_app([RunReader(folder)])).get("/api/runs/0/episodes", params=asked[0]).json()["found"]
    assert [each["index"] for each in found] == [20, 12]


def test_gaps_of_a_curve_stay_gaps(scripts: ViewScripts) -> None:
    """The mean is corrected for its start: a constant stays what it is."""
    assert scripts.call("format.js", "smooth", [3, None, 3, 3], 0.9) == [
        pytest.approx(3),
        None,
        *[pytest.approx(3)] * 2,
    ]
    assert scripts.call("format.js", "smooth", [0, 1], 0.5)[1] == pytest.approx(2 / 3)


def test_curves_of_runs_go_on_over_the_places_of_others(scripts: ViewScripts) -> None:
    """Two runs have hardly a second in common. A line ends only where the run's own row has no value."""
    one, other = (
        {"label": name, "name": "grad_norm", "rows": [{"step": step, "elapsed_s": 3600 * step + later, **values}
         for step, values in enumerate(rows, start=1)]}
        for name, later, rows in (
            ("one", 0, [{"grad_norm": 3}, {"grad_norm": 3}, {}, {"grad_norm": 3}]),
            ("other", 900, [{"grad_norm": 5}, {"grad_norm": 5}, {"grad_norm": 5}]),
        )
    )  # fmt: skip
    found = scripts.call("pages/curves.js", "metrics", [one, other], "time", 0.9, undefined="-")
    assert found["x"] == [1, 1.25, 2, 2.25, 3, 3.25, 4]
    expected = [3, "-", 3, None, None, None, 3], ["-", 5, "-", 5, "-", 5, "-"]
    assert [each["values"] for each in found["series"][::2]] == [*expected]
    smooth = [each["values"] for each in found["series"][1::2]]
    assert smooth == [[pytest.approx(each) if isinstance(each, int) else each for each in one] for one in expected]
    over_steps = scripts.call("pages/curves.js", "metrics", [one, other], "step", 0, undefined="-")
    assert [each["values"] for each in over_steps["series"]] == [[3, 3, None, 3], [5, 5, 5, "-"]]
    assert scripts.call("pages/curves.js", "metrics", [{**one, "rows": [{"step": 1}]}], "time", 0)["x"] == []


def test_only_numbers_are_offered_as_curves(scripts: ViewScripts) -> None:
    """Not the time of a step, or the replica that was paused longest; a number that was not measured at the end is."""
    rows = [{"step": 3, "time": "2026-11-30", "push_pause_max_replica": "r1", "groups": [1]}, {"step": 3, "mfu": None}]
    assert scripts.call("pages/curves.js", "numericNames", rows) == ["mfu", "step"]


def test_supervised_training_has_a_loss_in_place_of_a_reward(scripts: ViewScripts) -> None:
    """And neither staleness nor evaluations, which their pages say; the losses of its validations are in a file."""
    supervised = [{"step": 1, "loss": 1.5, "grad_norm": 3.0}]
    played = [{"step": 1, "policy_version": 1, "loss": 0.1, "reward_mean": 0.5, "reward_mean_played": 0.4}]
    filtered = [{**played[0], "num_filtered_groups": 2}]
    names = [
        [scripts.call("pages/curves.js", "namesOf", title, names, rows) for rows in (supervised, played, filtered, [])]
        for title, names in (("Reward", []), ("Loss", ["loss"]), ("Gradient norm", ["grad_norm"]))
    ]
    assert names == [
        [[], ["reward_mean"], ["reward_mean_played"], []],
        [["loss"], [], [], []],
        [["grad_norm"], [], [], []],
    ]
    for page, what in (("staleness", "Supervised training has no policy"), ("evaluation", "validation.jsonl")):
        texts = [scripts.call(f"pages/{page}.js", "whyEmpty", rows) for rows in (supervised, played, [])]
        assert [what in text for text in texts] == [True, False, False]


def test_an_evaluation_that_has_not_ended_has_no_result_yet(scripts: ViewScripts) -> None:
    """A folder of `penstock eval` has no steps; a run with steps and without evaluations is led to its recipe."""
    running, trained = [
        scripts.call("pages/evaluation.js", "whyEmpty", rows) for rows in ([], [{"step": 1, "policy_version": 1}])
    ]
    assert "no result yet" in running
    assert "[evaluation] of its recipe" not in running
    assert "[evaluation] of its recipe" in trained


def test_scores_of_runs_go_on_over_the_steps_of_others(scripts: ViewScripts) -> None:
    """Runs need not be evaluated at the same steps; a set that an evaluation lacks is a gap."""
    runs = [
        {"name": name, "rows": [{"step": step, "sets": {each: {"score": {"value": 0.5}} for each in sets}}
         for step, sets in evaluations.items()]}
        for name, evaluations in (("one", {10: "ab", 20: "a", 30: "ab"}), ("other", {15: "a"}))
    ]  # fmt: skip
    found = scripts.call("pages/curves.js", "scores", runs, undefined="-")
    assert found["x"] == [10, 15, 20, 30]
    assert {each["label"]: each["values"] for each in found["series"]} == {
        "one: a": [0.5, "-", 0.5, 0.5],
        "one: b": [0.5, None, None, 0.5],
        "other: a": ["-", 0.5, "-", "-"],
    }


@pytest.mark.parametrize(
    ("values", "places"),
    [
        ([None, 1, None, 2, 3, None], [1]),
        ([1, None, 2, 2, None, 3], [0, 5]),
        ([None, "-", 1, "-", None, 2, "-", 3], [2]),
        (["-", 1, "-"], [1]),
        ([1, 2], []),
        ([None, "-"], []),
        ([], []),
    ],
)
def test_a_value_between_gaps_is_a_point(scripts: ViewScripts, values: list[Any], places: list[int]) -> None:
    """A metric that only some steps have would be an empty chart. A line goes on over the places of other runs."""
    assert scripts.call("chart.js", "alone", values, undefined="-") == places


def test_a_rare_age_looks_as_rare_in_a_long_run(scripts: ViewScripts) -> None:
    """Steps that share a pixel are one column with their mean; drawn over each other their colours would add up."""
    shares = [[0.98, 0.02]] * 20_000
    columns = scripts.call("pages/staleness.js", "columnsOf", shares, 1196)
    assert len(columns) == 1196
    assert all(column["shares"] == [pytest.approx(0.98), pytest.approx(0.02)] for column in columns)
    ends = [-1, *(column["last"] for column in columns)]
    assert [column["first"] for column in columns] == [end + 1 for end in ends[:-1]]
    assert ends[-1] == 19_999


def test_a_column_of_the_staleness_names_its_steps(scripts: ViewScripts) -> None:
    """One step where there is room for all, else the mean of several."""
    rows = [{"step": step} for step in (11, 12, 13, 14)]
    shares = [[1, 0, 0], [0.5, 0.4995, 0.0005], [0, 1, 0], [0, 1, 0]]
    for count, texts in (
        (9, ["step 11: 100% of age 0", "step 12: 50% of age 0, 50% of age 1, 0.05% of age 2"]),
        (2, ["mean of steps 11 to 12: 75% of age 0, 25% of age 1, 0.025% of age 2"]),
    ):
        columns = scripts.call("pages/staleness.js", "columnsOf", shares, count)
        found = [scripts.call("pages/staleness.js", "describe", rows, column) for column in columns]
        assert found[: len(texts)] == texts
        assert len(found) == min(count, len(rows))


@pytest.mark.parametrize(
    ("key", "places"),
    [
        ("ArrowRight", {None: 3, 3: 4, 8: 9, 9: 9, 0: 3}),
        ("ArrowLeft", {None: 9, 9: 8, 3: 3, 20: 9}),
        ("Home", {None: 3, 5: 3}),
        ("End", {None: 9, 5: 9}),
        ("a", {None: None, 5: None}),
    ],
)
def test_keys_go_through_what_is_shown(scripts: ViewScripts, key: str, places: dict[int | None, int | None]) -> None:
    """Places 3 to 9, as of a chart that is zoomed; what was pointed at before may be elsewhere."""
    found = {place: scripts.call("keys.js", "placeAfter", key, place, 3, 9) for place in places}
    assert found == places


@pytest.mark.parametrize(
    ("middle", "length", "expected"),
    [(50, 20, (40, 60)), (5, 20, (1, 21)), (99, 20, (80, 100)), (50, 99, None), (50, 120, None)],
)
def test_a_zoom_shows_nothing_beyond_the_run(
    scripts: ViewScripts, middle: float, length: float, expected: tuple[float, float] | None
) -> None:
    """At its ends what is shown is not around the middle; at the whole length it is all."""
    found = scripts.call("chart.js", "rangeAround", middle, length, 1, 100)
    assert found == (expected and dict(zip(("min", "max"), expected, strict=True)))


def test_a_chart_reads_out_what_its_legend_shows(scripts: ViewScripts) -> None:
    """The step and each curve; values of single steps behind a smooth curve are left out."""
    series = [{"label": "step"}, {"label": "loss, each", "class": "thin"}, {"label": "loss"}, {"label": "entropy"}]
    data = [[7, 8], [0.5, 0.25], [0.5, 0.375], [None, None]]
    assert scripts.call("chart.js", "spoken", series, data, 1) == "step 8, loss 0.375, entropy –"


def test_a_page_is_drawn_again_for_what_it_shows(scripts: ViewScripts) -> None:
    """Also without a step. A run whose processes work is always news."""
    run = {"is_running": False, "alarm_kinds": [], "num_evaluations": 1, "kept_bytes": 7}
    shown = {"alarms": ("alarm_kinds", ["stuck"]), "evaluation": ("num_evaluations", 2), "samples": ("kept_bytes", 8)}
    for page, (key, value) in shown.items():
        for other in {key for key, _ in shown.values()} | {"is_running"}:
            changed = run | {other: value if other == key else "else"}
            is_news = scripts.call(f"pages/{page}.js", "default.news", {"run": 0, "runs": [run]}) != scripts.call(
                f"pages/{page}.js", "default.news", {"run": 0, "runs": [changed]}
            )
            assert is_news == (other == key)
    running = {"run": 0, "runs": [run | {"is_running": True}]}
    for page in ("fleet", "timeline"):
        assert scripts.call(f"pages/{page}.js", "default.news", {"run": 0, "runs": [run]}) is False
        assert scripts.call(f"pages/{page}.js", "default.news", running) == pytest.approx(time.time() / 10, abs=2)
    stuck = {"run": 0, "runs": [run | {"alarm_kinds": ["stuck"]}]}
    kind, half_minutes = scripts.call("pages/alarms.js", "default.news", stuck)  # the alarm says for how long
    assert (kind, half_minutes) == ("stuck", pytest.approx(time.time() / 30, abs=2))


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0, "0"), (17, "17"), (0.25, "0.25"), (1e-5, "1.00e-5"), (123456.789, "123500")]
)
def test_numbers_are_short(scripts: ViewScripts, value: float | None, text: str) -> None:
    """With four digits."""
    assert scripts.call("format.js", "number", value) == text


@pytest.mark.parametrize(
    ("step", "labels"),
    [
        (2.5, {1230: "1230", 1232.5: "1232.5", 1235: "1235"}),
        (0.25, {0: "0", 0.25: "0.25", 0.5: "0.5"}),
        (0.1, {0.1 + 0.2: "0.3", -0.1: "-0.1"}),
        (5e-7, {0: "0", 5e-7: "5e-7", 1e-6: "1e-6"}),
        (2500, {1_000_000: "1e+6", 1_002_500: "1.0025e+6"}),
    ],
)
def test_ticks_of_a_chart_differ(scripts: ViewScripts, step: float, labels: dict[float, str]) -> None:
    """With as many decimals as their distance has."""
    assert [scripts.call("format.js", "tickLabel", value, step) for value in labels] == [*labels.values()]


@pytest.mark.parametrize(
    ("step", "labels"),
    [
        (2, {900: "15.000 min", 902: "15.033 min", 904: "15.067 min"}),
        (20, {-20: "-20 s", 0: "0 ms", 20: "20 s", 7200: "2.0000 h"}),
        (0.01, {0.25: "250 ms", 1.25: "1.25 s"}),
        (None, {0.25: "250 ms", 20: "20.0 s", 902: "15.0 min", 7200: "2.0 h"}),
    ],
)
def test_ticks_of_the_timeline_differ(scripts: ViewScripts, step: float | None, labels: dict[float, str]) -> None:
    """Steps of two seconds a quarter of an hour after the start, for one. A duration alone has one decimal."""
    given = [] if step is None else [step]
    found = [scripts.call("format.js", "seconds", value, *given) for value in labels]
    assert [text.replace("\u00a0", " ") for text in found] == [*labels.values()]


def test_a_picture_without_a_file_has_no_address(scripts: ViewScripts) -> None:
    """It is named by its hash alone, or in runs of earlier releases not at all; a server would answer 404."""
    names = ["ab" * 32 + ".png", "ab" * 32, ""]
    assert [scripts.call("api.js", "image", 1, name) for name in names] == [f"api/runs/1/images/{names[0]}", "", ""]
