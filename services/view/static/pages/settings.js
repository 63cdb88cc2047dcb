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
    const names = [...new Set(all.flatMap((settings) => Object.keys(settings)))].sort();
    const shown = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));
    const rows = names.filter((name) => name.includes(text))
      .filter((name) => !onlyDifferent || new Set(all.map((settings) => shown(settings[name]))).size > 1)
      .map((name) => [h("code", {}, name), ...all.map((settings) => h("span", {}, shown(settings[name])))]);
    const search = h("input", { type: "search", value: text, placeholder: "part of a name", "aria-label": "Search", onchange: () => context.go({ text: search.value }) });
    return [
      h("div", { class: "tools" }, search, runs.length > 1 ? h("button", { type: "button", "aria-pressed": String(onlyDifferent),
        onclick: () => context.go({ all: onlyDifferent ? "1" : "" }) }, "only what differs") : null),
      rows.length ? table(["setting", ...runs.map((run) => run.name)], rows) : empty(onlyDifferent ? "The recipes do not differ." : "There is no such setting."),
    ];
  },
};
