// Who did what when: the trainer's steps and pushes, and the samples on each engine.

import { get } from "../api.js";
import { PARTS, SERIES, ink } from "../colours.js";
import { empty, h } from "../dom.js";
import { number, seconds } from "../format.js";
import { extent, isHeld, lanePlot, release } from "../lanes.js";
import { newSpans } from "../news.js";
import { timelineStep } from "./group.js";

const STEPS = 12; // shown at first
const NAMES = { train_s: "training", wait_s: "waiting for groups", data_wait_s: "waiting for prompts",
  demonstration_wait_s: "waiting for demonstrations", push_wait_s: "waiting for a push", checkpoint_wait_s: "waiting for files",
  evaluation_wait_s: "waiting for an evaluation", push: "push" };

let shownTo = 0; // the last step of the plot that was drawn last
let shownEnd = 0; // when the plot ends that was drawn last before the first step

const keyOf = (context) => context.parameters.toString();
const keyBefore = (context) => `${keyOf(context)}, before the first step`;

export default {
  title: "Timeline",
  isLive: (context) => !hasAskedForSteps(context) && !isHeld(keyOf(context)) && !isHeld(keyBefore(context)),
  news: (context) => newSpans(context.runs[context.run]),
  async draw(context) {
    const rows = context.steps[context.run].rows;
    if (!rows.length || isHeld(keyBefore(context))) {
      const drawn = await beforeSteps(context);
      if (drawn) return drawn;
      release(); // what was shown is not stored any longer
      if (!rows.length) return empty("No step has been trained yet.");
    }
    const last = rows.at(-1).step;
    const after = last + 1; // has what came after the last step, such as its evaluation
    const key = keyOf(context);
    const to = Math.min(Number(context.parameters.get("to") ?? (isHeld(key) ? shownTo : last)), after);
    const from = Math.max(1, Math.min(Number(context.parameters.get("from") ?? to - STEPS + 1), to));
    const [known, played] = await Promise.all([
      get(`api/runs/${context.run}/trace`, { first_step: Math.min(from, last), last_step: to }),
      get(`api/runs/${context.run}/spans`, { first_step: from - 1, last_step: to }),
    ]);
    if (!known.length) return [tools(context, from, to, after), empty("These steps have no trace.")];
    const steps = known.filter(({ step }) => step >= from);
    const spans = played.filter((group) => timelineStep(group) >= from && timelineStep(group) <= to);
    const [begin, trained] = extent(partsOf(known));
    const first = from > last ? trained : begin;
    const found = await get(`api/runs/${context.run}/processes`, { first, last: to > last ? undefined : trained });
    const end = to > last ? extent([{ start: trained, length: 0 }, ...found.spans])[1] : trained;
    if (!steps.length && !found.spans.length) return [tools(context, from, to, after), empty("Nothing was recorded after the last step.")];
    const recorded = processLanes(found.spans.map((span) => clip(span, first, end)));
    const lanes = [...trainerLanes(steps), ...(recorded.some((lane) => lane.isEngine) ? recorded : [...engineLanes(spans), ...recorded])];
    shownTo = to;
    return [tools(context, from, to, after), legend(), lanePlot(context, key, lanes), leftOut(found), lost(found), steps.length ? h("p", {}, summary(steps)) : null].filter(Boolean);
  },
};

// Steps from one that was asked for to the last one may be the whole run, which is too much to read again and again.
function hasAskedForSteps({ parameters, steps, run }) {
  return steps[run].rows.length > 0 && ["from", "to"].some((name) => parameters.get(name));
}

// What processes have done since the run's start, if that is stored; as far as it was shown, once somebody has zoomed,
// moved or chosen.
async function beforeSteps(context) {
  const key = keyBefore(context);
  const last = isHeld(key) ? shownEnd : undefined;
  const found = await get(`api/runs/${context.run}/processes`, { first: 0, last });
  if (!found.spans.length) return null;
  const [first, end] = extent(found.spans);
  shownEnd = last ?? end;
  const lanes = processLanes(found.spans.map((span) => clip(span, first, shownEnd)));
  const about = "Before the first step. The timeline goes on with the run until you zoom, move or choose, and again after “show all”.";
  return [h("p", {}, about), legend(), lanePlot(context, key, lanes), leftOut(found), lost(found)].filter(Boolean);
}

const leftOut = ({ num_left_out: number }) => (number
  ? h("p", { class: "faint" }, `${number} short spans are not drawn; show fewer steps.`) : null);

// Which processes lost spans, and how many.
function lost({ losses }) {
  const counts = new Map();
  for (const { process, num_dropped: spans, num_batches: messages } of losses) {
    const before = counts.get(process) ?? [0, 0];
    counts.set(process, [before[0] + spans, before[1] + messages]);
  }
  const many = (count, noun) => (count ? `${count} ${noun}${count === 1 ? "" : "s"}` : "");
  const parts = [...counts].sort(([a], [b]) => a.localeCompare(b)).map(([process, [spans, messages]]) =>
    `${process} ${[many(spans, "span"), many(messages, "message")].filter(Boolean).join(" and ")}`);
  return parts.length ? h("p", { class: "error" }, `Spans were lost and are not drawn: ${parts.join(", ")}.`) : null;
}

const partsOf = (steps) => steps.flatMap((step) => step.spans.map(([, start, length]) => ({ start, length })));

function tools(context, from, to, after) {
  const field = (name, value) => {
    const input = h("input", { type: "number", min: 1, max: after, value, style: { width: "6em" }, onchange: () => context.go({ [name]: input.value }) });
    return input;
  };
  const width = to - from + 1;
  return h("div", { class: "tools" },
    h("label", {}, "Steps ", field("from", from)), h("label", {}, "to ", field("to", to)),
    to === after ? h("span", {}, `${after}: after the last step`) : null,
    h("button", { type: "button", onclick: () => context.go({ from: Math.max(1, from - width), to: Math.max(1, from - 1) }) }, "earlier"),
    h("button", { type: "button", onclick: () => context.go({ from: Math.min(after, to + 1), to: Math.min(after, to + width) }) }, "later"),
    h("span", { class: "faint" }, "Wheel: zoom. Drag: move. Click a sample to read it, if its group was kept. Keys: arrows, Enter, + and −. It goes on with the run until you ask for steps, zoom, move or choose, and again once both fields are emptied and “show all” is pressed."));
}

function legend() {
  const entry = (text, attributes) => h("span", { class: "legend" }, h("span", attributes), text);
  return h("div", { class: "tools" },
    Object.entries(NAMES).map(([key, text]) => entry(text, { class: "scale part", style: { background: PARTS[key] } })),
    entry("failed", { class: "scale part failed" }));
}

function trainerLanes(steps) {
  const bars = (names) => steps.flatMap((step) => step.spans.filter(([name]) => names(name)).map(([name, start, length]) => ({
    start, length, colour: PARTS[name] ?? ink("faint"), text: `step ${step.step}: ${NAMES[name] ?? name}, ${seconds(length)}`, target: null })));
  return [
    { name: "trainer", rows: [bars((name) => name !== "push")] },
    { name: "pushes", rows: [bars((name) => name === "push")] },
  ];
}

// Spans may have begun before the shown steps, and go on after them.
export function clip(span, first, end) {
  const isWhole = span.start >= first && span.start + span.length <= end;
  const start = Math.max(first, span.start);
  const length = isWhole ? span.length : Math.min(end, span.start + span.length) - start;
  return { ...span, start, length, isWhole, whole: span.length };
}

const KINDS = [
  // Name of the span, its lane, and what it is.
  ["call", (span) => span.process, "call"],
  ["paused", (span) => `${span.process}: paused`, "paused by a push"],
  ["push.received", (span) => `${span.process}: push`, "stage of a push"],
  ["push.stage", () => "failed pushes", "stage of a push"],
  ["route.queued", () => "router: queue", "call waits for an engine"],
  ["group.played", (span) => `${span.process}: slots`, "a slot plays a group"],
  ["episode", (span) => `${span.process}: episodes`, "episode"],
  ["tool", (span) => `${span.process}: tools`, "tool"],
  ["session.call", (span) => `${span.process}: agents`, "agent's call"],
  ["environment.call", (span) => `${span.process}: calls`, "call of an environment"],
  ["verify", (span) => `${span.process}: verdicts`, "waits for verdicts"],
  ["judged", (span) => `${span.process}: verdicts`, "verdicts"],
  ["group.queued", () => "bus: prompts", "prompt waits for a worker"],
  ["group.held", () => "bus: groups to train", "finished group waits to be trained"],
  ["checkpoint", () => "checkpoints", "checkpoint"],
  ["evaluation", () => "evaluations", "evaluation"],
  ["process.starting", () => "processes starting", "starting"],
];

// The stages of a push in their order, by the names that engines and trainer give them.
const STAGES = { prepare: 0, upload: 1, pause: 2, receive: 3, transfer: 3, verify: 4, commit: 5 };

// The lanes of processes; each row of a worker's slots is one that plays a group at a time.
export function processLanes(spans) {
  return KINDS.flatMap(([name, laneOf, text]) => {
    const byLane = new Map();
    for (const span of spans) {
      if (span.name !== name) continue;
      const lane = laneOf(span);
      if (!byLane.has(lane)) byLane.set(lane, []);
      byLane.get(lane).push(barOf(span, text));
    }
    return [...byLane].sort(([a], [b]) => a.localeCompare(b)).map(([lane, found]) => ({ name: lane, rows: stacked(found), isEngine: name === "call" }));
  });
}

// One bar in the colour of its group, or of its stage of a push; a call is pale until its first token.
export function barOf(span, text) {
  const details = [
    span.stage,
    span.group === null ? null : `group ${span.group}${span.sample === null ? "" : `, sample ${span.sample}`}`,
    span.turn === undefined ? null : `turn ${span.turn}`,
    span.num_samples === undefined ? null : `${span.num_samples} samples`,
    span.mean_reward === undefined ? null : `mean reward ${number(span.mean_reward, 3)}`,
    span.num_tokens === undefined ? null : `${span.num_tokens} tokens`,
    span.first_token_s === undefined ? null : `first token after ${seconds(span.first_token_s)}`,
    span.queued_s === undefined ? null : `queued ${seconds(span.queued_s)}`,
    span.prefill_s === undefined ? null : `prefill ${seconds(span.prefill_s)}`,
    span.version === undefined ? null : `version ${span.version}`,
    span.replica, span.environment, span.service, span.error,
  ].filter((each) => each !== null && each !== undefined && each !== "");
  const order = span.group ?? STAGES[span.stage];
  const colour = order === undefined ? ink("faint") : SERIES[order % (SERIES.length - 1)];
  return { start: span.start, length: span.length, colour, isFailed: Boolean(span.error), text: `${text}, ${seconds(span.whole)}: ${details.join(", ")}`,
    target: span.number === null ? null : { n: span.number, sample: span.sample ?? 0 },
    pale: span.name === "call" && span.isWhole ? Math.min(span.first_token_s ?? 0, span.length) : 0 };
}

function engineLanes(groups) {
  const byEngine = new Map();
  for (const group of groups) {
    group.spans.forEach(([start, length, replicas], sample) => {
      const engine = replicas.length ? replicas.at(-1) : "no engine";
      if (!byEngine.has(engine)) byEngine.set(engine, []);
      byEngine.get(engine).push({ start, length, colour: SERIES[group.index % (SERIES.length - 1)],
        text: `group ${group.index}, sample ${sample}: ${seconds(length)}, reward ${number(group.rewards[sample], 3)}, ${group.outcome}`,
        target: { n: group.number, sample } });
    });
  }
  return [...byEngine].sort(([a], [b]) => a.localeCompare(b)).map(([name, bars]) => ({ name, rows: stacked(bars) }));
}

// Puts bars that overlap in rows below each other.
export function stacked(bars) {
  const rows = [];
  for (const bar of bars.sort((a, b) => a.start - b.start)) {
    let row = rows.find((each) => each.at(-1).start + each.at(-1).length <= bar.start);
    if (!row) rows.push((row = []));
    row.push(bar);
  }
  return rows.length ? rows : [[]];
}

// Where the trainer's time went in these steps. Pushes are beside it.
export function summary(steps) {
  const sums = {};
  for (const step of steps) for (const [name, , length] of step.spans) if (name !== "push") sums[name] = (sums[name] ?? 0) + length;
  const total = Object.values(sums).reduce((sum, value) => sum + value, 0) || 1;
  const parts = Object.entries(sums).sort(([, a], [, b]) => b - a).filter(([, value]) => value / total > 0.005);
  return `The trainer's time: ${parts.map(([name, value]) => `${NAMES[name] ?? name} ${((100 * value) / total).toFixed(1)}%`).join(", ")}.`;
}
