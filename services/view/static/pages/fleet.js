// What engines and other processes do now, and the pushes that paused an engine longest.

import { get } from "../api.js";
import { empty, h, table } from "../dom.js";
import { number, seconds } from "../format.js";
import { newSpans } from "../news.js";
import { isSupervised } from "../training.js";

const SILENT_S = 30; // from which an engine stands out

export default {
  title: "Fleet",
  isLive: () => true,
  news: (context) => newSpans(context.runs[context.run]), // loads of the last minute change always
  async draw(context) {
    if (isSupervised(context.steps[context.run].rows)) return empty("Supervised training has no engines.");
    const fleet = await get(`api/runs/${context.run}/fleet`);
    return [
      h("p", {}, overview(fleet)),
      fleet.replicas.length ? engines(fleet) : empty(
        "No engine has answered a call lately. Without spans (trace.max_gib = 0) engines are not known; see `penstock replicas`."),
      h("h2", {}, "Pushes, those that paused an engine longest first"),
      fleet.pushes.length ? pushes(context, fleet.pushes) : empty("Nothing has been pushed yet."),
      h("h2", {}, "Processes"),
      fleet.processes.length ? processes(fleet.processes) : empty("No process has sent spans lately."),
    ];
  },
};

// What is known of all engines.
export function overview(fleet) {
  const parts = [];
  if (fleet.num_replicas !== null) parts.push(`${fleet.num_replicas} ${fleet.num_replicas === 1 ? "replica" : "replicas"} at the last step`);
  if (fleet.published_version !== null) parts.push(`version ${fleet.published_version} was pushed last`);
  return `${parts.join(", ") || "No step has been trained yet"}. Loads and rates are means over the last ${seconds(fleet.window_s)}.`;
}

function engines(fleet) {
  const most = Math.max(1e-9, ...fleet.replicas.map((each) => each.mean_running));
  return table(["engine", "replica", "version", "calls running", "", "calls", "failed", "tokens/s", "first token", "paused", "last heard of"],
    fleet.replicas.map((each) => [
      each.process, each.replica || "–", version(each.version, fleet.published_version), fixed(each.mean_running), bar(each.mean_running / most),
      each.num_calls, each.num_failed_calls, fixed(each.output_tokens_per_s), seconds(each.first_token_s), seconds(each.paused_s),
      h("span", { class: each.silent_s > SILENT_S ? "error" : undefined }, `${seconds(each.silent_s)} ago`)]));
}

const fixed = (value) => Number(value.toFixed(1));

const bar = (share) => h("span", { class: "bar", role: "img", "aria-label": `${Math.round(100 * share)}% of the busiest` },
  h("i", { style: { width: `${100 * share}%` } }));

// The version that an engine serves, and how far it is behind the one that was published last.
export function version(served, published) {
  if (served === null) return "–";
  const behind = published === null ? 0 : published - served;
  return behind > 0 ? `${served} (${behind} behind)` : String(served);
}

function pushes(context, found) {
  return table(["step", "version", "longest pause", "of replica", "mean pause", "took", "MiB", "replicas", "missed", ""], found.map((each) => [
    h("a", { href: context.link("timeline", { from: each.step, to: each.step }) }, String(each.step)),
    each.version, seconds(each.push_pause_max_s), each.push_pause_max_replica || "–", seconds(each.push_pause_s), seconds(each.push_s), number((each.push_bytes ?? 0) / 2 ** 20, 3), each.push_replicas ?? "–",
    each.push_failed_replicas ?? 0, h("a", { href: context.link("samples", { step: each.step }) }, "samples")]));
}

function processes(found) {
  return table(["process", "state", "starts", "exit code", "last span"], found.map((each) => [
    each.process, each.state || "–", each.num_starts ?? "–", each.exit_code ?? "–",
    each.silent_s === null ? "–" : `${seconds(each.silent_s)} ago`]));
}
