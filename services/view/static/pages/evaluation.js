// Scores of the evaluation sets.

import { get } from "../api.js";
import { chart } from "../chart.js";
import { SERIES } from "../colours.js";
import { empty, h, table } from "../dom.js";
import { number, seconds } from "../format.js";
import { isSupervised } from "../training.js";

export default {
  title: "Evaluation",
  isLive: () => true,
  news: (context) => context.runs[context.run]?.num_evaluations,
  async draw(context) {
    const rows = await get(`api/runs/${context.run}/evaluations`);
    if (!rows.length) return empty(whyEmpty(context.steps[context.run].rows));
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
      return [link(context, row.step, name), name, estimate(found.score), estimate(atMost(found.pass_at)), estimate(atMost(found.majority_at)), found.num_prompts,
        `${number(100 * (found.truncated_fraction ?? 0), 3)}%`, seconds(row.elapsed_s)];
    }));
    return [h("div", { class: "charts" }, charts), h("h2", {}, "All evaluations"),
      table(["step", "set", "score", "pass@n", "maj@n", "prompts", "cut off", "took"], cells),
      h("p", { class: "faint" }, "A step leads to the answers that were kept; all are in samples.jsonl in the run's folder, those of evaluations during training in evaluations/step-….")];
  },
};

// A folder of `penstock eval` never has steps.
export function whyEmpty(rows) {
  if (isSupervised(rows)) return "Supervised training plays no evaluations; the losses of its validations are in validation.jsonl in the run's folder.";
  if (rows.length) return "This run has not been evaluated; see section [evaluation] of its recipe.";
  return "There is no result yet: an evaluation has one when its last prompt has been played. `penstock eval --resume` goes on with one that was interrupted.";
}

const link = (context, step, name) =>
  h("a", { href: context.link("samples", { outcome: "evaluated", step, sort: "reward", descending: "false" }), "aria-label": `step ${step}, ${name}` }, String(step));

// The estimate of the largest k, which is n.
export const atMost = (estimates = {}) => estimates[Math.max(...Object.keys(estimates).map(Number))];

export function estimate(value) {
  if (!value) return "–";
  return `${value.value.toFixed(3)}${value.standard_error == null ? "" : ` ± ${value.standard_error.toFixed(3)}`}`;
}
