// Scores of the evaluation sets.

import { get } from "../api.js";
import { chart } from "../chart.js";
import { SERIES } from "../colours.js";
import { empty, h, table } from "../dom.js";
import { number, seconds } from "../format.js";

export default {
  title: "Evaluation",
  isLive: true,
  async draw(context) {
    const rows = await get(`api/runs/${context.run}/evaluations`);
    if (!rows.length) return empty("This run has not been evaluated; see section [evaluation] of its recipe.");
    const names = [...new Set(rows.flatMap((row) => Object.keys(row.sets)))];
    const steps = rows.map((row) => row.step);
    const charts = names.map((name, order) => {
      const score = (row) => row.sets[name]?.score;
      const error = (row, sign) => (score(row)?.standard_error == null ? null : score(row).value + sign * score(row).standard_error);
      const colour = SERIES[order % SERIES.length];
      return chart(name, steps, [
        { label: "score", colour, values: rows.map((row) => score(row)?.value ?? null) },
        { label: "+ standard error", colour, thin: true, values: rows.map((row) => error(row, 1)) },
        { label: "− standard error", colour, thin: true, values: rows.map((row) => error(row, -1)) },
      ]);
    });
    const cells = rows.toReversed().flatMap((row) => names.filter((name) => row.sets[name]).map((name) => {
      const found = row.sets[name];
      return [row.step, name, estimate(found.score), estimate(found.pass_at_n), estimate(found.maj_at_n), found.num_prompts,
        `${number(100 * (found.truncated_fraction ?? 0), 3)}%`, seconds(row.elapsed_s)];
    }));
    return [h("div", { class: "charts" }, charts), h("h2", {}, "All evaluations"),
      table(["step", "set", "score", "pass@n", "maj@n", "prompts", "cut off", "took"], cells),
      h("p", { class: "faint" }, "The answers are in evaluations/step-…/samples.html in the run's folder.")];
  },
};

function estimate(value) {
  if (!value) return "–";
  return `${value.value.toFixed(3)}${value.standard_error == null ? "" : ` ± ${value.standard_error.toFixed(3)}`}`;
}
