// The recipe of a run, or where the recipes of several differ.

import { get } from "../api.js";
import { empty, h, table } from "../dom.js";

export default {
  title: "Settings",
  isLive: () => false,
  async draw(context) {
    const runs = context.runs;
    const all = await Promise.all(runs.map((run) => get(`api/runs/${run.number}/settings`)));
    const text = context.parameters.get("text") ?? "";
    const onlyDifferent = runs.length > 1 && context.parameters.get("all") !== "1";
    const rows = matching(all, text, onlyDifferent).map(([name, ...values]) => [h("code", {}, name), ...values.map((value) => h("span", {}, value))]);
    const search = h("input", { type: "search", value: text, placeholder: "part of a name", "aria-label": "Search", onchange: () => context.go({ text: search.value }) });
    return [
      h("div", { class: "tools" }, search, runs.length > 1 ? h("button", { type: "button", "aria-pressed": String(onlyDifferent),
        onclick: () => context.go({ all: onlyDifferent ? "1" : "" }) }, "only what differs") : null),
      rows.length ? table(["setting", ...runs.map((run) => run.name)], rows) : empty(onlyDifferent ? "The recipes do not differ." : "There is no such setting."),
    ];
  },
};

// The settings of runs whose names have `text` in them, in order: each name with its value in every run, as it is shown.
export function matching(all, text, onlyDifferent) {
  const names = [...new Set(all.flatMap((settings) => Object.keys(settings)))].sort();
  const shown = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));
  return names.filter((name) => name.includes(text)).map((name) => [name, ...all.map((settings) => shown(settings[name]))])
    .filter(([, ...values]) => !onlyDifferent || new Set(values).size > 1);
}
