// Line charts, which zoom and point together.

import uPlot from "./vendor/uPlot.mjs";
import { ink } from "./colours.js";
import { h } from "./dom.js";
import { number, tickLabel } from "./format.js";
import { placeAfter, zoomFactor } from "./keys.js";

const HEIGHT = 190;
const MOST_TICKS = 60; // more would be a bar
const LABEL_GAP = 3; // pixels beside the label of a mark
const LABEL_ROW = 12; // pixels from a row of labels to the next one

const zoomed = new Map(); // by the label of x: {min, max}, which all charts over it share, also when they are drawn anew
let shown = []; // charts of the page, and of one that is being drawn

// series: [{label, colour, values, dashed?}] over one list of x; marks: [{x, text, isTick?, colour?, row?}], whose labels
// are in rows; pick gets the x that is clicked.
export function chart(title, x, series, { xLabel = "step", marks = [], low, note = "", pick } = {}) {
  const box = h("figure", {}, h("figcaption", {}, h("b", {}, title), h("span", { class: "faint" }, note)));
  let isDrawn = false; // the first range is nobody's wish
  const options = {
    width: 400,
    height: HEIGHT,
    cursor: {
      sync: { key: xLabel },
      drag: { x: true, y: false },
      bind: { dblclick: (_, __, showAll) => (event) => { zoomed.delete(xLabel); showAll(event); } },
    },
    scales: { x: { time: false }, y: { range: (_, min, max) => range(min, max, low) } },
    axes: [axis({ size: 32 }), axis({ size: 64 })],
    series: [
      { label: xLabel },
      ...series.map((each) => ({
        label: each.label, class: each.thin ? "thin" : undefined, stroke: each.colour, width: each.thin ? 1 : 1.75, dash: each.dashed ? [5, 4] : undefined,
        alpha: each.thin ? 0.35 : 1, spanGaps: false, points: pointsOf(each.values), value: (_, value) => number(value),
      })),
    ],
    hooks: {
      draw: [(plot) => drawMarks(plot, marks)],
      setScale: [(plot, key) => { if (key === "x" && isDrawn) zoomAll(plot, xLabel, x); }],
    },
  };
  const plot = new uPlot(options, [x, ...series.map((each) => each.values)], box);
  if (zoomed.has(xLabel)) plot.setScale("x", zoomed.get(xLabel));
  const act = pick && (() => { if (plot.cursor.idx !== null) pick(x[plot.cursor.idx]); });
  if (act) onClick(plot.over, act);
  onKeys(plot, title, xLabel, act);
  requestAnimationFrame(() => { isDrawn = true; });
  const resize = () => plot.setSize({ width: Math.max(200, box.clientWidth - 18), height: HEIGHT });
  const observer = new ResizeObserver(resize);
  observer.observe(box);
  shown.push({ box, plot, xLabel, observer });
  return box;
}

// Frees the charts that are no longer on the page. uPlot keeps each for ever, and moves its cursor, until it is destroyed.
export function forgetCharts() {
  for (const each of shown) {
    if (each.box.isConnected) continue;
    each.observer.disconnect();
    each.plot.destroy();
  }
  shown = shown.filter((each) => each.box.isConnected);
}

// The places of values that are part of no line: on both sides the next place that is not undefined is null, or there is none.
export function alone(values) {
  const ends = (place) => (values[place] ?? null) === null;
  const known = [...values.keys()].filter((place) => values[place] !== undefined);
  return known.filter((place, order) => !ends(place) && ends(known[order - 1]) && ends(known[order + 1]));
}

// What is part of no line is a point.
function pointsOf(values) {
  const places = alone(values);
  return { show: false, filter: () => (places.length ? places : null) };
}

function zoomAll(plot, label, x) {
  const { min, max } = plot.scales.x;
  const known = zoomed.get(label);
  const isWhole = min <= x[0] && max >= x.at(-1);
  if (known ? known.min === min && known.max === max : isWhole) return;
  zoomed.set(label, { min, max });
  for (const each of shown) {
    if (each.plot !== plot && each.xLabel === label && each.box.isConnected) each.plot.setScale("x", { min, max });
  }
}

// Shows all charts over `xLabel` nearer or farther, with `middle` in the middle: by default what is there.
export function zoomBy(xLabel, factor, middle) {
  const { min, max } = rangeOf(xLabel);
  show(xLabel, middle ?? (min + max) / 2, (max - min) * factor);
}

// What the charts over `xLabel` show: from min to max; all of it is from first to last, in steps of about `step`.
function rangeOf(xLabel) {
  const all = plotsOver(xLabel).map((plot) => plot.data[0]).filter((x) => x.length);
  const [first, last] = [Math.min(...all.map((x) => x[0])), Math.max(...all.map((x) => x.at(-1)))];
  const step = (last - first) / Math.max(1, ...all.map((x) => x.length - 1));
  return { first, last, step, min: first, max: last, ...zoomed.get(xLabel) };
}

const plotsOver = (xLabel) => shown.filter((each) => each.box.isConnected && each.xLabel === xLabel).map(({ plot }) => plot);

function show(xLabel, middle, length) {
  const { first, last, step } = rangeOf(xLabel);
  const range = rangeAround(middle, Math.max(length, 2 * step), first, last);
  if (range) zoomed.set(xLabel, range);
  else zoomed.delete(xLabel);
  for (const plot of plotsOver(xLabel)) { // at once, since the cursor is placed by it; the same data show all of it
    plot.batch(() => (range ? plot.setScale("x", range) : plot.setData(plot.data)));
  }
}

// The range of this length around `middle` that lies between first and last; null if it has all of that.
export function rangeAround(middle, length, first, last) {
  if (!(length < last - first)) return null;
  const min = Math.max(first, Math.min(middle - length / 2, last - length));
  return { min, max: min + length };
}

// A click, not the end of a drag.
function onClick(element, act) {
  let pressed = null;
  element.addEventListener("mousedown", (event) => { pressed = event.clientX; });
  element.addEventListener("click", (event) => { if (Math.abs(event.clientX - pressed) < 3) act(); });
}

// The keys point as the mouse does and zoom, and Enter is a click, if there is anything to do then.
function onKeys(plot, title, xLabel, act) {
  const { over, data: [x] } = plot;
  const say = (attributes) => Object.entries(attributes).forEach(([name, value]) => over.setAttribute(`aria-${name}`, value));
  over.tabIndex = 0;
  over.setAttribute("role", "slider");
  say({ label: `${title}; arrow keys, Home and End point, + and - zoom${act ? ", Enter is a click" : ""}`, valuemin: x[0], valuemax: x.at(-1), valuenow: x.at(-1) });
  over.addEventListener("keydown", (event) => {
    if (event.key === "Enter") act?.();
    const factor = zoomFactor(event), at = plot.cursor.idx ?? null;
    const ends = at === null ? plot.series[0].idxs : [0, x.length - 1]; // from a step the keys lead on, beyond what is shown
    const next = factor ? at : placeAfter(event.key, at, ...ends);
    if (factor) zoomBy(xLabel, factor, x[next]);
    if (next === null) return;
    event.preventDefault();
    const { min, max } = plot.scales.x;
    if (x[next] < min || x[next] > max) show(xLabel, x[next], max - min);
    plot.setCursor({ left: Math.max(0, plot.valToPos(x[next], "x")), top: HEIGHT / 2 }, true, true);
    const place = plot.cursor.idx; // null where the range that is shown has no value
    if (place !== null) say({ valuenow: x[place], valuetext: spoken(plot.series, plot.data, place) });
  });
}

// The values at a place as they are read out: those of the legend, which has no thin series.
export function spoken(series, data, place) {
  const values = series.map(({ label, class: kind }, order) => kind !== "thin" && `${label} ${number(data[order][place])}`);
  return values.filter(Boolean).join(", ");
}

function axis(more = {}) {
  const values = (_, ticks, __, ___, step) => ticks.map((tick) => tickLabel(tick, step));
  return { stroke: ink("faint"), grid: { stroke: ink("line"), width: 1 }, ticks: { stroke: ink("line") }, values, ...more };
}

function range(min, max, low) {
  if (min === null || max === null) return [0, 1];
  const bottom = low === undefined ? min : Math.min(low, min);
  const room = (max - bottom) * 0.06 || Math.abs(max) * 0.1 || 1;
  return [bottom === low ? bottom : bottom - room, max + room];
}

// Of `count` ticks every how manieth is drawn.
export const everyNth = (count) => Math.max(1, Math.ceil(count / MOST_TICKS));

// The marks from low to high that are drawn: of many ticks every nth, counted from the first of all, so that a chart that
// is moved keeps them.
export function drawnMarks(marks, low, high) {
  const isSeen = ({ x }) => x >= low && x <= high;
  const nth = everyNth(marks.filter((mark) => mark.isTick && isSeen(mark)).length);
  let order = -1;
  return marks.filter((mark) => {
    if (mark.isTick) order += 1;
    return isSeen(mark) && (!mark.isTick || order % nth === 0);
  });
}

// The labels, each {left, width, row}, that overlap none before them.
export function freeLabels(labels) {
  const free = [];
  for (const label of labels) {
    const overlaps = ({ left, width, row }) =>
      row === label.row && left < label.left + label.width + LABEL_GAP && label.left < left + width + LABEL_GAP;
    if (!free.some(overlaps)) free.push(label);
  }
  return free;
}

function drawMarks(plot, marks) {
  const { ctx, bbox: { left, top, width, height } } = plot;
  const pixel = devicePixelRatio;
  const drawn = drawnMarks(marks, plot.scales.x.min, plot.scales.x.max);
  const numRows = drawn.reduce((most, { row = 0 }) => Math.max(most, row + 1), 1);
  ctx.save();
  ctx.font = `${11 * pixel}px system-ui`;
  ctx.textAlign = "left";
  ctx.textBaseline = "alphabetic";
  ctx.lineWidth = pixel;
  const faint = ink("faint");
  const labels = [];
  for (const { x, text, isTick, colour = faint, row = 0 } of drawn) {
    const place = plot.valToPos(x, "x", true);
    ctx.strokeStyle = colour;
    // Lines of several rows at one place share it, dash by dash.
    ctx.setLineDash(isTick ? [] : [2 * pixel, (3 + 5 * (numRows - 1)) * pixel]);
    ctx.lineDashOffset = -5 * row * pixel;
    ctx.beginPath();
    ctx.moveTo(place, isTick ? top + height - 6 * pixel : top);
    ctx.lineTo(place, top + height);
    ctx.stroke();
    if (!text) continue;
    const dot = colour === faint ? "" : "● ";
    const long = ctx.measureText(dot + text).width;
    const after = place + LABEL_GAP * pixel;
    labels.push({ text, dot, colour, row, width: long, left: after + long > left + width ? place - LABEL_GAP * pixel - long : after });
  }
  ctx.setLineDash([]);
  ctx.strokeStyle = ink("paper"); // around a label, which may cross a curve
  ctx.lineWidth = 3 * pixel;
  ctx.lineJoin = "round";
  for (const label of freeLabels(labels)) {
    const bottom = top + (11 + LABEL_ROW * label.row) * pixel;
    ctx.strokeText(label.dot + label.text, label.left, bottom);
    ctx.fillStyle = faint; // a run's colour stands out too little for text
    ctx.fillText(label.dot + label.text, label.left, bottom);
    ctx.fillStyle = label.colour;
    ctx.fillText(label.dot, label.left, bottom);
  }
  ctx.restore();
}
