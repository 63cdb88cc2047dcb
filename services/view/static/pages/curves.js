// Curves of one or several runs over steps or time.

import { get } from "../api.js";
import { chart, everyNth, zoomBy } from "../chart.js";
import { SERIES } from "../colours.js";
import { empty, h, select } from "../dom.js";
import { smooth } from "../format.js";
import { FARTHER, NEARER } from "../keys.js";
import { isSupervised } from "../training.js";

const PANELS = [
  ["Reward", [], {}],
  ["Loss", ["loss"], {}],
  ["Held-out score", [], { evaluations: true }],
  ["|trainer − engine| log-probability", ["dlogp_mean_current", "dlogp_mean"], { low: 0 }],
  ["Staleness, versions", ["staleness_mean", "staleness_max"], { low: 0 }],
  ["Gradient norm", ["grad_norm"], { low: 0 }],
  ["Entropy, nats", ["entropy"], {}],
  ["Tokens of a sample", ["sample_tokens_mean"], { low: 0 }],
  ["Samples cut off, share", ["truncated_fraction"], { low: 0 }],
  ["Seconds of a step", ["step_s", "train_s", "wait_s"], { low: 0 }],
  ["Seconds of a push", ["push_s", "push_pause_s", "push_pause_max_s"], { low: 0 }],
  ["Trainer idle, share", ["trainer_idle_fraction"], { low: 0 }],
  ["Output tokens a second", ["output_tokens_per_s"], { low: 0 }],
  ["Replicas", ["num_replicas"], { low: 0 }],
  ["Groups that were not trained", ["num_stale_groups", "num_failed_groups", "num_filtered_groups"], { low: 0 }],
];

let picked = null; // {run, step}: the step that was clicked last, also when the page is drawn anew

export default {
  title: "Curves",
  isLive: () => true,
  news: (context) => chosenRuns(context).map((number) => context.runs[number]?.num_evaluations),
  async draw(context) {
    const axis = context.parameters.get("x") ?? "step";
    const weight = Number(context.parameters.get("smooth") ?? 0.6);
    const extra = context.parameters.get("metric") ?? "";
    const chosen = chosenRuns(context);
    if (chosen.every((number) => context.steps[number].rows.length === 0)) return empty("No step has been trained yet.");
    const evaluations = await Promise.all(chosen.map((number) => get(`api/runs/${number}/evaluations`)));
    const place = placeOn(axis);
    const links = h("span", { class: "facts", role: "status" }, "Click a curve for the samples of its step, or press Enter.");
    const pickStep = (step) => {
      picked = { run: context.run, step };
      links.replaceChildren(...linksOf(context, step));
    };
    const pick = (x) => {
      const row = context.steps[context.run].rows.find((each) => place(each) === x);
      if (row) pickStep(row.step);
    };
    if (picked?.run === context.run) pickStep(picked.step);
    const zoom = (factor) => {
      const row = factor < 1 && picked?.run === context.run && context.steps[context.run].rows.find(({ step }) => step === picked.step);
      zoomBy(labelOf(axis), factor, row ? place(row) : undefined);
    };
    const panels = extra ? [[extra, [extra], {}], ...PANELS] : PANELS;
    const runs = chosen.map((number, order) => ({ name: context.runs[number].name, rows: context.steps[number].rows, evaluations: evaluations[order] }));
    const marks = marksOf(runs, axis);
    const shown = panels.map(([title, names, options]) => options.evaluations
      ? evaluationPanel(title, runs, pickStep)
      : panel(title, names, { ...options, pick }, runs, marks, axis, weight)).filter(Boolean);
    return [tools(context, axis, weight, extra, chosen, aboutMarks(runs), links, zoom), h("div", { class: "charts" }, shown)];
  },
};

// Where a step leads. Filtered groups have the number of the next step and evaluated ones that of their weights: the step trained neither.
export function linksOf(context, step) {
  return [h("b", {}, `step ${step}`),
    h("a", { href: context.link("samples", { step, outcome: "trained", sort: "lowest", descending: "false" }) }, "its worst samples"),
    h("a", { href: context.link("samples", { step, sort: "dlogp" }) }, "largest difference to the engine"),
    h("a", { href: context.link("timeline", { from: step, to: step }) }, "timeline")];
}

function chosenRuns(context) {
  const asked = context.parameters.get("with");
  const others = asked ? asked.split(",").map(Number).filter((number) => context.runs[number]) : [];
  return [...new Set([context.run, ...others])];
}

const labelOf = (axis) => (axis === "time" ? "hours" : "step");

function tools(context, axis, weight, extra, chosen, about, links, zoom) {
  const names = numericNames(chosen.map((number) => context.steps[number].rows.at(-1) ?? {}));
  const slider = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: weight,
    onchange: () => context.go({ smooth: slider.value }) });
  const compare = context.runs.filter((run) => run.number !== context.run).map((run) => {
    const box = h("input", { type: "checkbox", checked: chosen.includes(run.number), onchange: () => {
      const next = box.checked ? [...chosen, run.number] : chosen.filter((number) => number !== run.number);
      context.go({ with: next.filter((number) => number !== context.run).join(",") });
    } });
    return h("label", {}, box, ` ${run.name}`);
  });
  const button = (text, factor) => h("button", { type: "button", onclick: () => zoom(factor) }, text);
  return h("div", { class: "tools" },
    select("Over", axis, [["step", "steps"], ["time", "hours of training"]], (x) => context.go({ x })),
    h("label", {}, "Smoothing ", slider),
    select("Also", extra, [["", "–"], ...names.map((name) => [name, name])], (metric) => context.go({ metric })),
    compare.length ? h("span", {}, "Compare: ", compare) : null,
    h("span", {}, button("zoom in", NEARER ** 3), " ", button("zoom out", FARTHER ** 3), " ", button("show all", Infinity)),
    h("span", { class: "faint" }, `Drag to zoom, double-click to see all. Keys: arrows, Home, End, Enter, + and −. ${about}`), links);
}

function panel(title, names, options, runs, marks, axis, weight) {
  // One metric per run where runs are compared, all of the panel's for one run.
  const isCompared = runs.length > 1;
  const sets = runs.flatMap((run, order) => {
    const known = namesOf(title, names, run.rows);
    return (isCompared ? known.slice(0, 1) : known).map((name, place) =>
      ({ label: isCompared ? run.name : name, rows: withStart(run), name, row: order, colour: colourOf(isCompared ? order : place) }));
  });
  if (!sets.length) return null;
  const { x, series } = metrics(sets, axis, weight);
  const ofSets = marks.filter(({ row }) => sets.some((each) => each.row === row));
  return chart(title, x, series, { ...options, xLabel: labelOf(axis), marks: ofSets, note: names.length === 1 ? names[0] : "" });
}

const colourOf = (order) => SERIES[order % SERIES.length];

// The rows of a run, and one before the first step if its first weights were evaluated.
function withStart({ rows, evaluations }) {
  if (!rows.length || !evaluations.some(({ step }) => step === 0)) return rows;
  return [{ step: 0, ...(rows[0].elapsed_s === undefined ? {} : { elapsed_s: 0 }) }, ...rows];
}

// The metrics of a panel that a run has. A policy may learn while its loss does not fall, so that has no panel.
export function namesOf(title, names, rows) {
  const wanted = title === "Reward" ? [rewardOf(rows)] : title === "Loss" && !isSupervised(rows) ? [] : names;
  return wanted.filter((name) => rows.some((row) => typeof row[name] === "number"));
}

// What a curve can show of rows: a number, or null where nothing was measured. Times and replicas have names.
export function numericNames(rows) {
  const isNumeric = ([, value]) => value === null || typeof value === "number";
  return [...new Set(rows.flatMap((row) => Object.entries(row).filter(isNumeric).map(([name]) => name)))].sort();
}

// With filters the batch's own mean says little: they keep it away from 0 and 1.
function rewardOf(rows) {
  return rows.some((row) => row.num_filtered_groups) ? "reward_mean_played" : "reward_mean";
}

// What happened in runs, each {rows, evaluations}, and where; `row` is the run's order. One run has its pushes as ticks. Of
// several, which would have them at the same steps, each has the rest in its colour.
export function marksOf(runs, axis) {
  const place = placeOn(axis);
  if (runs.length === 1) return marksOfRun(runs[0], place).map((mark) => ({ ...mark, row: 0 }));
  return runs.flatMap((run, row) => marksOfRun(run, place).filter((mark) => !mark.isTick).map((mark) => ({ ...mark, row, colour: colourOf(row) })));
}

function marksOfRun(run, place) {
  const rows = withStart(run);
  const restarts = rows.filter((row, index) => index && row.trainer_start > rows[index - 1].trainer_start)
    .map((row) => ({ x: place(row), text: "restart" }));
  const failed = rows.filter((row) => row.push_s !== undefined && row.push_failed_replicas).map((row) => ({ x: place(row), text: "push failed" }));
  const evaluated = run.evaluations.map(({ step }) => [step, rows.find((row) => row.step >= step)]) // not every step is in an exported page
    .filter(([, row]) => row).map(([step, row]) => ({ x: place({ ...row, step }), text: "eval" }));
  const pushes = rows.filter((row) => row.push_s !== undefined && !row.push_failed_replicas).map((row) => ({ x: place(row), text: "", isTick: true }));
  return [...restarts, ...failed, ...evaluated, ...pushes];
}

// What the marks of runs are, as the page says it.
export function aboutMarks(runs) {
  if (runs.length > 1) return "Dotted lines are in the colour of their run. Ticks for pushes are drawn where one run is shown.";
  const count = marksOf(runs, "step").filter((mark) => mark.isTick).length;
  if (!count) return "";
  return everyNth(count) === 1 ? "Ticks are pushes." : `Ticks are pushes, one in ${everyNth(count)}; zoom in for more.`;
}

function evaluationPanel(title, runs, pick) {
  const { x, series } = scores(runs.map(({ name, evaluations }) => ({ name, rows: evaluations })));
  return x.length ? chart(title, x, series, { pick }) : null;
}

// The curves of metrics, each {label, rows, name, colour}, over the steps or hours of all their rows.
export function metrics(sets, axis, weight) {
  const place = placeOn(axis);
  const x = placesOf(sets, place);
  const series = sets.flatMap(({ label, rows, name, colour }) => {
    const values = valuesAt(x, rows, place, (row) => row[name]);
    const smoothed = { label, colour, values: smooth(values, weight) };
    return weight > 0 ? [{ label: `${label}, each`, colour, values, thin: true }, smoothed] : [smoothed];
  });
  return { x, series };
}

// The curves of the scores of runs, each {name, rows}, over the steps at which any of them was evaluated.
export function scores(runs) {
  const x = placesOf(runs, placeOn("step"));
  const curves = runs.flatMap(({ name: run, rows }) => [...new Set(rows.flatMap((row) => Object.keys(row.sets)))].map((name) => ({
    label: runs.length > 1 ? `${run}: ${name}` : name, values: valuesAt(x, rows, placeOn("step"), (row) => row.sets[name]?.score?.value) })));
  return { x, series: curves.map((each, order) => ({ ...each, colour: colourOf(order) })) };
}

// Where a row is on the axis; undefined if it does not say it.
function placeOn(axis) {
  if (axis !== "time") return (row) => row.step;
  return (row) => (row.elapsed_s === undefined ? undefined : row.elapsed_s / 3600);
}

// The places of all rows of several runs, ascending.
function placesOf(runs, place) {
  return [...new Set(runs.flatMap(({ rows }) => rows.map(place)))].filter((value) => value !== undefined).sort((a, b) => a - b);
}

// A run's values at these places: undefined, over which a line goes on, where it has no row, as at most places of another
// run; null, at which a line ends, where its row has none, and from there to its next values.
function valuesAt(x, rows, place, value) {
  const byPlace = new Map(rows.map((row) => [place(row), value(row) ?? null]));
  const values = x.map((each) => byPlace.get(each));
  let begin = 0; // after the last value, or the last place that is null
  values.forEach((each, index) => {
    if (each === null) values.fill(null, begin, index);
    if (each !== undefined) begin = index + 1;
    else if (values[index - 1] === null) values[index] = null;
  });
  return values;
}
