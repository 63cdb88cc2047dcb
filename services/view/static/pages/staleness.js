// How old the trained tokens were: a heat map of steps and versions.

import { canvas } from "../canvas.js";
import { chart } from "../chart.js";
import { SERIES, ink, sequential } from "../colours.js";
import { empty, h } from "../dom.js";
import { isSupervised } from "../training.js";

const LEFT = 44;
const CELL = 26;
const BOTTOM = 20;

export default {
  title: "Staleness",
  isLive: true,
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
          { label: "bound", colour: SERIES[6], dashed: true, values: rows.map((row) => row.max_staleness) },
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
  const place = (width) => (width - LEFT) / rows.length;
  const view = canvas(height, "Share of tokens by step and age", (pen, width) => {
    pen.clearRect(0, 0, width, height);
    const cell = place(width);
    rows.forEach((row, column) => shares[column].forEach((share, lag) => {
      const y = (most - lag) * CELL;
      pen.fillStyle = sequential(Math.sqrt(share));
      pen.fillRect(LEFT + column * cell, y, Math.max(cell, 0.5), CELL - 1);
    }));
    pen.fillStyle = ink("faint");
    for (let lag = 0; lag <= most; lag += 1) pen.fillText(String(lag), 12, (most - lag) * CELL + 17);
    pen.fillText(`step ${rows[0].step}`, LEFT, height - 5);
    const last = `step ${rows.at(-1).step}`;
    pen.fillText(last, width - pen.measureText(last).width - 4, height - 5);
  });
  view.surface.onmousemove = (event) => {
    const column = Math.floor((event.offsetX - LEFT) / place(view.box.clientWidth));
    const lag = most - Math.floor(event.offsetY / CELL);
    note.textContent = shares[column]?.[lag] === undefined ? " "
      : `step ${rows[column].step}: ${(100 * shares[column][lag]).toFixed(1)}% of the tokens are ${lag} versions old`;
  };
  return h("div", {}, view.box, note);
}
