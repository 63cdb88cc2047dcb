// The kept groups: filter, sort, search.

import { get } from "../api.js";
import { empty, h, select } from "../dom.js";
import { mean, number } from "../format.js";

const PAGE = 100;
const ORDERS = [["step", "step"], ["reward", "mean reward"], ["lowest", "worst sample"], ["spread", "spread of rewards"], ["tokens", "longest sample"],
  ["turns", "turns"], ["dlogp", "difference to the engine"], ["lag", "age"], ["index", "admission"]];
const OUTCOMES = ["", "trained", "stale", "filtered", "failed", "evaluated"];
const FOUND = [ // what people look for
  ["worst", { sort: "lowest", descending: "false" }], ["largest difference to the engine", { sort: "dlogp" }],
  ["longest", { sort: "tokens" }], ["cut off", { finish: "length" }], ["evaluated", { outcome: "evaluated" }]];
const FINISHES = ["", "stop", "length", "deadline", "environment", "error"];

export default {
  title: "Samples",
  isLive: () => true,
  news: (context) => context.runs[context.run]?.kept_bytes,
  async draw(context) {
    const asked = Object.fromEntries(["outcome", "step", "row", "finish", "text", "sort", "descending", "start"]
      .map((name) => [name, context.parameters.get(name) ?? ""]));
    const found = await get(`api/runs/${context.run}/episodes`, { ...asked, limit: PAGE });
    const cards = found.found.map((entry) => card(context, entry, asked));
    return [
      tools(context, asked),
      h("p", { class: "facts" }, "Find:", FOUND.map(([text, how]) => h("a", { href: context.link("samples", keptStep(asked, how)) }, text))),
      h("p", { class: "faint", role: "status" }, `${found.num_found} of ${found.num_kept} kept groups`
        + (asked.row ? `, all of row ${asked.row}` : "")),
      found.num_unsearched ? h("p", { class: "facts", role: "status" },
        `${found.num_unsearched} groups were not searched yet: it takes long to read all of their texts.`,
        h("button", { type: "button", onclick: () => context.again() }, "go on searching")) : "",
      found.num_kept === 0 ? empty("No group has been kept yet. With episodes.keep = 'off' none is.")
        : cards.length ? h("ul", { class: "list" }, cards.map((each) => h("li", {}, each))) : empty("No group is like that."),
      pages(context, found.num_found, Number(asked.start) || 0),
    ];
  },
};

function tools(context, asked) {
  const start = "";
  const text = h("input", { type: "search", value: asked.text, placeholder: "words in prompt or answers", "aria-label": "Search",
    onchange: () => context.go({ text: text.value, start }) });
  const step = h("input", { type: "number", min: 0, value: asked.step, style: { width: "6em" },
    onchange: () => context.go({ step: step.value, start }) });
  const flip = h("button", { type: "button", "aria-pressed": String(asked.descending !== "false"),
    onclick: () => context.go({ descending: asked.descending === "false" ? "" : "false", start }) },
    asked.descending === "false" ? "lowest first" : "highest first");
  return h("div", { class: "tools" },
    text,
    select("Outcome", asked.outcome, OUTCOMES.map((each) => [each, each || "any"]), (outcome) => context.go({ outcome, start })),
    select("Ended by", asked.finish, FINISHES.map((each) => [each, each || "any"]), (finish) => context.go({ finish, start })),
    h("label", {}, "Step ", step),
    select("Sort by", asked.sort || "step", ORDERS, (sort) => context.go({ sort, start })),
    flip,
    Object.values(asked).some(Boolean) ? h("a", { href: context.link("samples") }, "show all") : null);
}

const keptStep = (asked, how) => (asked.step === "" ? how : { ...how, step: asked.step });

// The sample of the group, and the token, for which the list is sorted.
export function within(entry, asked) {
  if (asked.sort === "dlogp") return { at: "difference" };
  const known = entry.rewards.filter((reward) => reward !== null);
  if (!["reward", "lowest"].includes(asked.sort) || !known.length) return {};
  const isLowest = asked.sort === "lowest" || asked.descending === "false";
  return { sample: entry.rewards.indexOf(isLowest ? Math.min(...known) : Math.max(...known)) };
}

function card(context, entry, asked) {
  return h("a", { class: "card", href: context.link("group", { n: entry.number, ...within(entry, asked) }) },
    h("div", { class: "facts" },
      h("span", { class: `badge ${entry.outcome}` }, entry.outcome),
      h("span", {}, "step ", h("b", {}, entry.step)),
      h("span", {}, entry.source ? `${entry.source}, ` : "", "group ", entry.index),
      h("span", {}, rewards(entry.rewards), " ", h("b", {}, number(mean(entry.rewards), 3))),
      h("span", {}, `up to ${Math.max(0, ...entry.num_tokens)} tokens`),
      entry.versions.length ? h("span", {}, `age ${entry.version - entry.versions[0]}`) : null,
      entry.dlogp_max === null ? null : h("span", {}, `|dlogp| ≤ ${number(entry.dlogp_max, 2)}`),
      entry.reason ? h("span", {}, entry.reason) : null),
    h("p", {}, entry.prompt || entry.error || "–"),
    h("p", { class: "faint" }, entry.texts[0] ?? entry.error));
}

export function rewards(values) {
  return h("span", { class: "rewards", role: "img", "aria-label": `rewards ${values.map((value) => number(value, 3)).join(", ")}` },
    values.map((value) => h("i", { class: value === null ? "none" : "", title: number(value, 3),
      style: { "--share": `${100 * Math.min(1, Math.max(0, value ?? 0))}%` } })));
}

function pages(context, total, start) {
  if (total <= PAGE) return "";
  return h("div", { class: "tools" },
    start > 0 ? h("button", { type: "button", onclick: () => context.go({ start: Math.max(0, start - PAGE) }) }, "before") : null,
    h("span", { class: "faint" }, `${start + 1} to ${Math.min(total, start + PAGE)}`),
    start + PAGE < total ? h("button", { type: "button", onclick: () => context.go({ start: start + PAGE }) }, "next") : null);
}
