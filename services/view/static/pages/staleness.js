// How old the trained tokens were: a heat map of steps and versions.

import { canvas } from "../canvas.js";
import { chart } from "../chart.js";
import { SERIES, ink, sequential } from "../colours.js";
import { empty, h } from "../dom.js";
import { mean, number } from "../format.js";
import { placeAfter } from "../keys.js";
import { isSupervised } from "../training.js";

const LEFT = 44;
const CELL = 26;
const BOTTOM = 20;

export default {
  title: "Staleness",
  isLive: () => true,
  draw(context) {
    const all = context.steps[context.run].rows;
    const rows = all.filter((row) => row.max_staleness !== undefined);
    if (!rows.length) return empty(whyEmpty(all));
    const most = rows.reduce((most, row) => Math.max(most, row.max_staleness, row.token_lag_max ?? 0), 0);
    const shares = rows.map((row) => {
      const counts = Array.from({ length: most + 1 }, (_, lag) => row[`num_tokens_lag_${lag}`] ?? 0);
      const total = counts.reduce((sum, value) => sum + value, 0) || 1;
      return counts.map((value) => value / total);
    });
    const steps = rows.map((row) => row.step);
    return [
      h("p", {}, `Share of each step's tokens by age in versions; groups may be ${rows.at(-1).max_staleness} old.`),
      heatMap(rows, shares, most),
      h("div", { class: "charts" },
        chart("Age of a group's oldest token", steps, [
          { label: "mean", colour: SERIES[0], values: rows.map((row) => row.staleness_mean ?? null) },
          { label: "most", colour: SERIES[1], values: rows.map((row) => row.staleness_max ?? null) },
          { label: "bound", colour: SERIES.at(-1), dashed: true, values: rows.map((row) => row.max_staleness) },
        ], { low: 0 }),
        chart("Groups rejected as stale, in all", steps, [
          { label: "groups", colour: SERIES[1], values: rows.map((row) => row.num_stale_groups ?? null) }], { low: 0 })),
    ];
  },
};

export const whyEmpty = (rows) => (isSupervised(rows)
  ? "Supervised training has no policy whose tokens could be old." : "No step has been trained yet.");

function heatMap(rows, shares, most) {
  const height = (most + 1) * CELL + BOTTOM;
  const note = h("p", { class: "faint", "aria-live": "polite" }, " ");
  let columns = [];
  let chosen = null; // by the keyboard: the first row of a column
  const chosenPlace = () => (chosen === null ? null : columns.findIndex(({ last }) => last >= chosen));
  const view = canvas(height, "Share of tokens by step and age; arrow keys, Home and End go through the steps", (pen, width) => {
    columns = columnsOf(shares, Math.max(1, Math.floor(width - LEFT)));
    const left = (place) => Math.round(LEFT + (place * (width - LEFT)) / columns.length); // whole pixels, so that no seam is seen
    pen.clearRect(0, 0, width, height);
    columns.forEach((column, place) => column.shares.forEach((share, lag) => {
      pen.fillStyle = sequential(Math.sqrt(share));
      pen.fillRect(left(place), (most - lag) * CELL, left(place + 1) - left(place), CELL - 1);
    }));
    if (chosen !== null) {
      pen.strokeStyle = ink("ink");
      const place = chosenPlace();
      pen.strokeRect(left(place) + 0.5, 0.5, left(place + 1) - left(place), height - BOTTOM - 1);
    }
    pen.fillStyle = ink("faint");
    for (let lag = 0; lag <= most; lag += 1) pen.fillText(String(lag), 12, (most - lag) * CELL + 17);
    pen.fillText(`step ${rows[0].step}`, LEFT, height - 5);
    const last = `step ${rows.at(-1).step}`;
    pen.fillText(last, width - pen.measureText(last).width - 4, height - 5);
  });
  view.surface.onmousemove = (event) => {
    const place = Math.floor(((event.offsetX - LEFT) / (view.box.clientWidth - LEFT)) * columns.length);
    note.textContent = columns[place] ? describe(rows, columns[place]) : " ";
  };
  view.surface.tabIndex = 0;
  view.surface.onkeydown = (event) => {
    const place = placeAfter(event.key, chosenPlace(), 0, columns.length - 1);
    if (place === null) return;
    event.preventDefault();
    chosen = columns[place].first;
    note.textContent = describe(rows, columns[place]);
    view.redraw();
  };
  return h("div", {}, view.box, note);
}

// At most `count` columns, each {first, last, shares}: the mean shares of the rows from first to last. Translucent
// columns that are narrower than a pixel would add up, and what is rare would look common.
export function columnsOf(shares, count) {
  const num = Math.min(count, shares.length);
  const begin = (column) => Math.floor((column * shares.length) / num);
  return Array.from({ length: num }, (_, column) => {
    const rows = shares.slice(begin(column), begin(column + 1));
    return { first: begin(column), last: begin(column + 1) - 1, shares: rows[0].map((_, lag) => mean(rows.map((row) => row[lag]))) };
  });
}

// The numbers of a column: its steps, and the share of each age that any of their tokens has.
export function describe(rows, { first, last, shares }) {
  const steps = first === last ? `step ${rows[first].step}` : `mean of steps ${rows[first].step} to ${rows[last].step}`;
  const ages = shares.map((share, lag) => share > 0 && `${number(100 * share, 3)}% of age ${lag}`);
  return `${steps}: ${ages.filter(Boolean).join(", ")}`;
}
