// Line charts, which zoom and point together.

import uPlot from "./vendor/uPlot.mjs";
import { ink } from "./colours.js";
import { h } from "./dom.js";
import { number, tickLabel } from "./format.js";
import { placeAfter } from "./keys.js";

const HEIGHT = 190;
const MOST_TICKS = 60; // more would be a bar

const zoomed = new Map(); // by the label of x: {min, max}, which all charts over it share, also when they are drawn anew
let shown = []; // charts of the page, and of one that is being drawn

// series: [{label, colour, values, dashed?}] over one list of x; marks: [{x, text, isTick?}]; pick gets the x that is clicked.
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
    axes: [axis(), axis({ size: 64 })],
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
  onKeys(plot, title, act);
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

// A click, not the end of a drag.
function onClick(element, act) {
  let pressed = null;
  element.addEventListener("mousedown", (event) => { pressed = event.clientX; });
  element.addEventListener("click", (event) => { if (Math.abs(event.clientX - pressed) < 3) act(); });
}

// The keys point as the mouse does, and Enter is a click, if there is anything to do then.
function onKeys(plot, title, act) {
  const { over, data: [x] } = plot;
  const say = (attributes) => Object.entries(attributes).forEach(([name, value]) => over.setAttribute(`aria-${name}`, value));
  over.tabIndex = 0;
  over.setAttribute("role", "slider");
  say({ label: `${title}; arrow keys, Home and End point${act ? ", Enter is a click" : ""}`, valuemin: x[0], valuemax: x.at(-1), valuenow: x.at(-1) });
  over.addEventListener("keydown", (event) => {
    if (event.key === "Enter") act?.();
    const next = placeAfter(event.key, plot.cursor.idx, ...plot.series[0].idxs);
    if (next === null) return;
    event.preventDefault();
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

function drawMarks(plot, marks) {
  const { ctx } = plot;
  ctx.save();
  ctx.strokeStyle = ink("faint");
  ctx.fillStyle = ink("faint");
  ctx.font = `${11 * devicePixelRatio}px system-ui`;
  const ticks = marks.filter((mark) => mark.isTick && mark.x >= plot.scales.x.min && mark.x <= plot.scales.x.max);
  const shownMarks = ticks.length > MOST_TICKS ? marks.filter((mark) => !mark.isTick) : marks;
  for (const { x, text, isTick } of shownMarks) {
    const place = plot.valToPos(x, "x", true);
    if (place < plot.bbox.left || place > plot.bbox.left + plot.bbox.width) continue;
    ctx.setLineDash(isTick ? [] : [2, 3]);
    ctx.beginPath();
    ctx.moveTo(place, isTick ? plot.bbox.top + plot.bbox.height - 6 * devicePixelRatio : plot.bbox.top);
    ctx.lineTo(place, plot.bbox.top + plot.bbox.height);
    ctx.stroke();
    ctx.fillText(text, place + 3, plot.bbox.top + 11 * devicePixelRatio);
  }
  ctx.restore();
}
