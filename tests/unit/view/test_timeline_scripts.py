"""The logic of the Timeline's page and of its lanes, which are tested in a browser by `make test-browser` too."""

import json
from pathlib import Path

import msgspec
import pytest

from services.view.export.excerpt import excerpt_of
from services.view.run_reader import RunReader
from tests.support.view_runs import add_end, add_spans, make_run
from tests.support.view_scripts import ViewScripts

_RUN = """
    // A browser's document as far as the page needs it.
    let made = []; // the elements of the page that was drawn last
    const pen = new Proxy({}, { get: () => () => {}, set: () => true });
    class Element {
        clientWidth = 1000;
        isConnected = true;
        style = { setProperty() {} };
        constructor(tag) { this.tag = tag; }
        setAttribute(name, value) { this[name] = value; }
        addEventListener(kind, act) { this[`on${kind}`] = act; }
        append(...children) { this.textContent = children.map((child) => child.textContent ?? child).join(""); }
        getContext() { return pen; }
    }
    document.createElement = (tag) => { made.push(new Element(tag)); return made.at(-1); };
    globalThis.ResizeObserver = class { constructor(act) { this.observe = act; } };
    globalThis.getComputedStyle = () => ({ getPropertyValue: () => "" });
    globalThis.devicePixelRatio = 1;

    // A run that goes on.
    const rows = [];
    const started = [];
    const losses = [];
    const train = () => rows.push({ step: rows.length + 1 });
    const startProcess = (start) => started.push({ name: "process.starting", process: "launcher", start, length: 1,
        service: `service ${start}`, group: null, sample: null, number: null });
    globalThis.answer = (path) => {
        const last = Number(/[?&]last=([0-9]+)/.exec(path)?.[1] ?? Infinity);
        const answers = {
            trace: rows.map(({ step }) => ({ step, spans: [["train_s", 100 * step, 50]] })),
            spans: [],
            processes: { num_left_out: 0, spans: started.filter(({ start }) => start <= last), losses },
        };
        return JSON.stringify(answers[path.split("?")[0].split("/").at(-1)]);
    };

    const parameters = { get: () => null, toString: () => "" };
    const context = { run: 0, runs: [{}], steps: [{ rows }], parameters, again() {} };
    const page = load("pages/timeline.js").default;
    const draw = async () => {
        made = [];
        return [await page.draw(context)].flat().map(({ textContent }) => textContent).join(" ");
    };
    const element = (is) => made.filter(is).at(-1);
    const surface = () => element(({ tag }) => tag === "canvas");
    const press = (key) => surface().onkeydown({ key, preventDefault() {} });
    const note = () => element((each) => each["aria-live"]).textContent.trim();
    const showAll = () => element(({ tag, textContent }) => tag === "button" && textContent === "show all").onclick();
"""
"""The page of a run, on which `press`, `note` and `showAll` are what a user does and sees."""


def test_the_trainer_s_time_is_summed_up(scripts: ViewScripts) -> None:
    """The largest part first, without those of less than half a percent; pushes are beside the steps."""
    steps = [
        {"step": 1, "spans": [["wait_s", 0.0, 1.0], ["train_s", 1.0, 5.0], ["push", 6.0, 50.0], ["odd_s", 9.0, 0.02]]},
        {"step": 2, "spans": [["wait_s", 6.0, 2.0], ["odd_s", 8.0, 0.02]]},
    ]
    text = scripts.call("pages/timeline.js", "summary", steps)
    assert text == "The trainer's time: training 62.2%, waiting for groups 37.3%."
    assert scripts.call("pages/timeline.js", "summary", steps[:1]).startswith("The trainer's time: training 83.1%, ")


def test_bars_that_overlap_are_below_each_other(scripts: ViewScripts) -> None:
    """In as few rows as there are at once."""
    bars = [{"start": start, "length": 2} for start in (0, 1, 2, 3, 6)]
    rows = scripts.call("pages/timeline.js", "stacked", bars)
    assert [[bar["start"] for bar in row] for row in rows] == [[0, 2, 6], [1, 3]]
    assert scripts.call("pages/timeline.js", "stacked", []) == [[]]


def test_a_worker_has_a_row_for_each_slot(scripts: ViewScripts) -> None:
    """A slot plays one group at a time, and shows it in the group's colour above the group's episodes."""
    common = {"process": "worker-0", "sample": None, "isWhole": True, "name": "group.played", "num_samples": 4}
    groups = [
        common | {"group": group, "number": 10 + group, "start": start, "length": 2, "whole": 2, "mean_reward": reward}
        for group, start, reward in ((1, 0, 0.25), (2, 1, None), (3, 2, 1))
    ]
    episode = groups[0] | {"name": "episode", "sample": 0}
    slots, episodes = scripts.call("pages/timeline.js", "processLanes", [episode, *groups])
    assert (slots["name"], episodes["name"]) == ("worker-0: slots", "worker-0: episodes")
    assert [[bar["text"] for bar in row] for row in slots["rows"]] == [
        [
            "a slot plays a group, 2.0\u00a0s: group 1, 4 samples, mean reward 0.25",
            "a slot plays a group, 2.0\u00a0s: group 3, 4 samples, mean reward 1",
        ],
        ["a slot plays a group, 2.0\u00a0s: group 2, 4 samples, mean reward –"],
    ]
    assert slots["rows"][0][0]["colour"] == episodes["rows"][0][0]["colour"]
    assert slots["rows"][0][0]["target"] == {"n": 11, "sample": 0}


def test_an_engine_s_stages_of_a_push_are_in_a_lane_of_its_own(scripts: ViewScripts) -> None:
    """Side by side, each in its colour; those that failed, which the engine may not know of, name the replica."""
    common = {"group": None, "sample": None, "number": None, "isWhole": True, "version": 5, "length": 1, "whole": 1}
    received = [
        common | {"process": process, "name": "push.received", "start": start, "stage": stage}
        for process in ("rollout-0", "rollout-1")
        for start, stage in enumerate(("prepare", "pause", "receive"))
    ]
    failed = common | {"process": "trainer", "name": "push.stage", "start": 9, "stage": "transfer"}
    about = {"replica": "engine-7", "error": "exceeded its deadline"}
    first, second, lost = scripts.call("pages/timeline.js", "processLanes", [*received, failed | about])
    assert [lane["name"] for lane in (first, second, lost)] == ["rollout-0: push", "rollout-1: push", "failed pushes"]
    (bars,) = first["rows"]
    assert [bar["text"] for bar in bars] == [
        f"stage of a push, 1.0\u00a0s: {stage}, version 5" for stage in ("prepare", "pause", "receive")
    ]
    assert len({bar["colour"] for bar in bars}) == 3
    ((bar,),) = lost["rows"]
    assert bar["text"] == "stage of a push, 1.0\u00a0s: transfer, version 5, engine-7, exceeded its deadline"
    assert bar["isFailed"]


def test_a_span_that_goes_on_is_drawn_as_far_as_it_is_seen(scripts: ViewScripts) -> None:
    """It says how long it is."""
    inside, over = [{"start": start, "length": 4} for start in (3, 8)]
    clipped = [scripts.call("pages/timeline.js", "clip", span, 2, 10) for span in (inside, over)]
    assert [(each["start"], each["length"], each["isWhole"], each["whole"]) for each in clipped] == [
        (3, 4, True, 4),
        (8, 2, False, 4),
    ]


def test_the_timeline_goes_on_with_the_run_unless_steps_are_asked_for(scripts: ViewScripts) -> None:
    """Those from the first one are the whole run, which is too much to read at every step."""
    is_live = """
        const page = load("pages/timeline.js").default;
        const parameters = (asked) => ({ get: (key) => asked[key] ?? null });
        const isLive = (rows) => (asked) => page.isLive({ run: 0, steps: [{ rows }], parameters: parameters(asked) });
        const asked = [{}, { run: "1" }, { from: "3" }, { to: "7" }, { from: "3", to: "7" }];
        return [asked.map(isLive([{ step: 1 }])), asked.map(isLive([]))];
    """
    assert scripts.run(is_live) == [[True, True, False, False, False], [True] * 5], "without a step there are no fields"


def test_the_timeline_before_the_first_step_stays_once_a_bar_is_chosen() -> None:
    """It is the same one when it is drawn again after the first step, until `show all` is pressed."""
    code = """
        startProcess(10);
        startProcess(12);
        await draw();
        const seen = [page.isLive(context)];
        press("ArrowRight");
        seen.push(page.isLive(context), note());
        train();
        startProcess(30);
        await draw();
        seen.push(note());
        press("ArrowRight");
        press("ArrowRight");
        seen.push(note());
        showAll();
        return [...seen, page.isLive(context), (await draw()).includes("The trainer's time"), note()];
    """
    first, second = (f"starting, 1.0\xa0s: service {start}" for start in (10, 12))
    assert ViewScripts().run(_RUN + code) == [True, False, first, first, second, True, True, ""]


def test_the_timeline_goes_to_the_steps_if_what_was_shown_before_them_is_deleted() -> None:
    """The oldest files of a trace are deleted above a size."""
    code = """
        startProcess(10);
        await draw();
        press("ArrowRight");
        train();
        started.length = 0;
        const drawn = await draw();
        return [drawn.includes("The trainer's time"), page.isLive(context)];
    """
    assert ViewScripts().run(_RUN + code) == [True, True]


def test_what_the_mouse_points_at_is_described_while_the_run_goes_on() -> None:
    """As long as it is shown: the timeline is drawn again at every step."""
    code = """
        train();
        await draw();
        surface().onpointermove({ offsetX: 500, offsetY: 24 });
        const seen = [note()];
        for (let step = 2; step <= 13; step += 1) {
            train();
            await draw();
            seen.push(note());
        }
        return seen;
    """
    assert ViewScripts().run(_RUN + code) == ["step 1: training, 50.0\xa0s"] * 12 + [""]


def test_the_timeline_says_which_processes_lost_spans() -> None:
    """Before the first step too; each process once, and none where none are lost."""
    code = """
        startProcess(10);
        const drawn = [await draw()];
        const lose = (process, num_dropped, num_batches) => losses.push({ process, num_dropped, num_batches });
        lose("worker-0", 12, 0);
        lose("router", 0, 2);
        lose("worker-0", 30, 1);
        drawn.push(await draw());
        train();
        drawn.push(await draw());
        return drawn.map((text) => /Spans were lost[^.]*\\./.exec(text)?.[0] ?? "");
    """
    lost = "Spans were lost and are not drawn: router 2 messages, worker-0 42 spans and 1 message."
    assert ViewScripts().run(_RUN + code) == ["", lost, lost]


def test_a_failed_call_differs_from_those_of_every_group(scripts: ViewScripts) -> None:
    """By a mark of its own: each of the few colours is that of many groups."""
    common = {"name": "call", "start": 1, "length": 2, "whole": 2, "sample": 0, "number": None, "isWhole": True}
    for group in range(12):
        good, failed = (
            scripts.call("pages/timeline.js", "barOf", common | {"group": group} | more, "call")
            for more in ({}, {"error": "DEADLINE_EXCEEDED"})
        )
        assert (good["isFailed"], failed["isFailed"]) == (False, True)
        assert good["colour"] == failed["colour"]
        assert failed["text"].endswith("DEADLINE_EXCEEDED")


def test_a_timeline_of_very_many_bars_has_an_extent(scripts: ViewScripts) -> None:
    """A long run has more than a function takes as arguments."""
    bars = [{"start": start, "length": 9 if start == 7 else 0.5} for start in range(200_000)]
    assert scripts.call("lanes.js", "extent", bars) == [0, 199_999.5]
    assert scripts.call("lanes.js", "extent", bars[3:9]) == [3, 16]


def test_a_timeline_can_be_zoomed_out_again(scripts: ViewScripts) -> None:
    """A swipe over a trackpad is many turns of a wheel. The moment at the mouse stays where it is."""
    assert scripts.call("lanes.js", "zoomed", 0, 10, 5, 0.8) == [pytest.approx(1), pytest.approx(9)]
    low, middle, high = 1_700_000_000.0, 1_700_000_030.0, 1_700_000_100.0
    for _ in range(100):
        low, high = scripts.call("lanes.js", "zoomed", low, high, middle, 0.8)
    assert high - low == pytest.approx(1e-3, abs=1e-6)
    assert low < middle < high
    for _ in range(60):
        low, high = scripts.call("lanes.js", "zoomed", low, high, middle, 1.25)
    assert high - low > 100


@pytest.mark.parametrize(
    ("outcome", "step", "shown"), [("evaluated", 0, 1), ("evaluated", 20, 21), ("trained", 20, 20), ("failed", 0, 1)]
)
def test_a_group_leads_to_the_timeline_of_when_it_was_played(
    scripts: ViewScripts, outcome: str, step: int, shown: int
) -> None:
    """The weights of a step are evaluated beside the next one."""
    assert scripts.call("pages/group.js", "timelineStep", {"outcome": outcome, "step": step}) == shown


def test_an_exported_timeline_goes_on_after_the_last_step(tmp_path: Path) -> None:
    """The page asks for spans there without an end, and finds its evaluation."""
    run = make_run(tmp_path / "run")
    add_spans(run)
    add_end(run)
    excerpt = excerpt_of(0, RunReader(run), max_bytes=10**7)
    data = msgspec.json.decode(msgspec.json.encode({"exported": "now", "runs": [{**excerpt.data, "left_out": []}]}))
    asked = {"first": 1_700_000_062.0}
    found = ViewScripts(data).call("exported.js", "exported.get", "api/runs/0/processes", asked)
    assert [(span["name"], span["length"]) for span in found["spans"]] == [("evaluation", 20.0)]
    assert found["losses"] == []


def test_an_exported_timeline_says_what_was_lost(tmp_path: Path) -> None:
    """Once, though several stretches of steps show it, and only of the time that is shown."""
    run = make_run(tmp_path / "run")
    add_spans(run)
    lines = (run / "trace" / "spans-1700000000000.jsonl").read_text().splitlines()
    about = {**json.loads(lines[0]), "stored": 1_700_000_055.0}
    again = {**about, "stored": 1_700_000_063.0, "batch": about["batch"] | {"number": 4, "dropped": 7, "spans": []}}
    lines[0] = json.dumps(about)
    (run / "trace" / "spans-1700000000000.jsonl").write_text("\n".join([*lines, json.dumps(again)]) + "\n")
    data = excerpt_of(0, RunReader(run), max_bytes=10**7).data
    exported = msgspec.json.decode(msgspec.json.encode({"exported": "now", "runs": [{**data, "left_out": []}]}))
    scripts = ViewScripts(exported)
    found = [
        scripts.call("exported.js", "exported.get", "api/runs/0/processes", {"first": first, "last": first + 1})[
            "losses"
        ]
        for first in (1_700_000_050.0, 1_700_000_056.0)
    ]
    lost = {
        "process": "rollout-0",
        "start": 1_700_000_055.0,
        "end": 1_700_000_063.0,
        "num_dropped": 7,
        "num_batches": 2,
    }
    assert found == [[], [lost]]
