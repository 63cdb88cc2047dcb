// One group: its problem, its samples beside each other, and one of them token by token.

import { array, get, image } from "../api.js";
import { conversation, numPlaced, toolNames } from "../conversation.js";
import { h, pictures, select, table } from "../dom.js";
import { number, seconds } from "../format.js";
import { rewards } from "./samples.js";
import { tokenView } from "../tokens.js";

export default {
  title: "Group",
  isLive: () => false,
  async draw(context) {
    const place = Number(context.parameters.get("n"));
    const group = await get(`api/runs/${context.run}/episodes/${place}`);
    const chosen = choose(context.parameters, group.samples);
    return [
      facts(context, group),
      h("h2", {}, "Problem"),
      pictures(group.images, (name) => image(context.run, name)),
      group.messages.map((message) => h("div", { class: "message" }, h("b", {}, message.role), message.content,
        message.tool_calls ? ` ${JSON.stringify(message.tool_calls)}` : null)),
      h("p", {}, h("b", {}, "Gold answer: "), group.golds.join("  or  ") || "–"),
      group.samples.length ? [h("h2", {}, "Samples"), siblings(context, group, chosen.sample), sampleView(context, group, chosen)] : null,
    ].flat(Infinity).filter(Boolean);
  },
};

// The places of the sample that is shown and of its sequence: those that are asked for, else the largest difference's.
function choose(parameters, samples) {
  const [sample, sequence] = ["sample", "sequence"].map((name) => parameters.get(name));
  const most = sample === null ? mostDiverged(samples) : { sample: Number(sample) || 0, sequence: 0 };
  const shown = Math.max(0, Math.min(most.sample, samples.length - 1));
  const last = (samples[shown]?.sequences.length ?? 1) - 1;
  return { sample: shown, sequence: Math.max(0, Math.min(sequence === null ? most.sequence : Number(sequence) || 0, last)) };
}

// Where the largest difference between trainer and engine is; the first sequence of all if none was computed.
export function mostDiverged(samples) {
  let found = { sample: 0, sequence: 0 };
  let most = 0;
  samples.forEach((each, sample) => each.sequences.forEach((tokens, sequence) => {
    const trainer = array(tokens.logprobs, "f4");
    const engine = array(tokens.engine_logprobs, "f4");
    const difference = trainer ? trainer.reduce((largest, value, place) => Math.max(largest, Math.abs(value - engine[place])), 0) : 0;
    if (difference > most) [found, most] = [{ sample, sequence }, difference];
  }));
  return found;
}

function facts(context, group) {
  return h("div", { class: "facts" },
    h("span", { class: `badge ${group.outcome}` }, group.outcome),
    h("span", {}, "step ", h("b", {}, group.step)),
    h("span", {}, `${group.source ? `${group.source}, ` : ""}group ${group.index}, attempt ${group.attempt}`),
    h("span", {}, rewards(group.samples.map((sample) => sample.reward))),
    h("span", {}, `environment ${group.environment || "–"}`),
    group.reason ? h("span", {}, group.reason) : null,
    group.error ? h("span", { class: "error" }, group.error) : null,
    h("a", { href: context.link("samples", { row: `${group.source}/${group.row}`, sort: "step", descending: "false" }) }, "the same prompt over versions"),
    h("a", { href: context.link("timeline", { from: timelineStep(group), to: timelineStep(group) }) }, "in the timeline"));
}

// The step whose timeline has a group, or the begin of its evaluation: a step's weights are evaluated beside the next one.
export function timelineStep({ step, outcome }) {
  return outcome === "evaluated" ? step + 1 : Math.max(1, step);
}

function siblings(context, group, chosen) {
  const rows = group.samples.map((sample, place) => [
    h("a", { href: context.link("group", { n: context.parameters.get("n"), sample: place }), "aria-current": place === chosen ? "true" : undefined },
      place === chosen ? `▸ ${place}` : String(place)),
    sample.reward ?? "–",
    sample.advantage === null ? "–" : Number(sample.advantage.toPrecision(3)),
    sample.turns.reduce((sum, turn) => sum + turn.num_output_tokens, 0),
    sample.turns.length,
    sample.finish_reason,
    sample.verdict ? `${sample.verdict.status}${sample.verdict.extracted ? `: ${sample.verdict.extracted}` : ""}` : sample.error || "–",
    seconds(sample.elapsed_s),
    h("span", { class: "faint line" }, sample.text.length > 90 ? `${sample.text.slice(0, 90)}…` : sample.text),
  ]);
  return table(["sample", "reward", "advantage", "tokens", "turns", "ended by", "verdict", "took", "answer"], rows);
}

// What is known of a sample's turns; times of 0 are not.
export function turnRows(sample) {
  const known = (value) => seconds(value || null);
  return sample.turns.map((turn, order) => [order, turn.replica_id || "–", turn.started_at ? seconds(turn.started_at - sample.started_at) : "–",
    known(turn.waited_s), known(turn.generated_s), toolNames(turn) || "–", known(turn.environment_s),
    turn.num_prompt_tokens, turn.num_cached_tokens, turn.num_output_tokens, number(turn.reward)]);
}

function sampleView(context, group, chosen) {
  const sample = group.samples[chosen.sample];
  const place = chosen.sequence;
  const choice = sample.sequences.length > 1 ? select("Sequence", String(place),
    sample.sequences.map((_, order) => [String(order), `${order + 1} of ${sample.sequences.length}`]),
    (sequence) => context.go({ sequence })) : null;
  const shown = sample.sequences[place];
  const of = (name) => image(context.run, name);
  const said = conversation(sample.sequences, place, sample.turns, (number) => pictures([shown.images[number]], of, number));
  const added = shown.images.slice(group.images.length, said ? shown.images.length - numPlaced(shown) : undefined);
  return [
    h("h2", {}, `Sample ${chosen.sample}, token by token`),
    sample.error ? h("p", { class: "error" }, sample.error) : null,
    sample.ended_by ? h("p", { class: "faint" }, `${sample.finish_reason}: ${sample.ended_by}`) : null,
    table(["turn", "engine", "began after", "waited", "generated", "tools", "environment", "prompt tokens", "cached", "output tokens", "reward"],
      turnRows(sample)),
    choice,
    added.length ? [h("p", { class: "faint" }, "Pictures that the environment added:"), pictures(added, of)] : null,
    said,
    tokenView(context, group.prompt, shown, group.version),
  ];
}
