// A sequence as people read it: what the policy wrote and what the environment answered, in turn.

import { array } from "./api.js";
import { h } from "./dom.js";

const REPEATED = 4; // equal tokens, from which they are counted: a picture is hundreds of them

// Returns null where the environment added nothing to the sequence at `place`; `turns` are the sample's.
export function conversation(sequences, place, turns) {
  const said = messages(sequences, place);
  return said && h("details", { open: true }, h("summary", {}, "Conversation"),
    said.map(({ turn, text }, order) => h("div", { class: turn === null ? "message" : "message own" },
      h("b", {}, turn === null ? speaker(said, order, turns) : `policy, turn ${turn}`), text)));
}

// The environment, with the tools that the turn before called.
function speaker(said, order, turns) {
  const before = said[order - 1]?.turn ?? (said[order + 1]?.turn ?? 0) - 1;
  const names = toolNames(turns[before] ?? {});
  return names ? `environment: ${names}` : "environment";
}

// The names of the tools that a turn called, each once; empty if it called none.
export const toolNames = ({ tools = [] }) => [...new Set(tools)].join(", ");

// The texts of the sequence in order, each with its turn, which are counted over all sequences; null: the environment's.
export function messages(sequences, place) {
  const owns = sequences.slice(0, place + 1).map((sequence) => array(sequence.own, "u1"));
  const own = owns.pop();
  if (!own.includes(0)) return null;
  const parts = [];
  sequences[place].texts.forEach((text, token) => {
    if (begins(own, token)) parts.push({ isOwn: Boolean(own[token]), texts: [] });
    parts.at(-1).texts.push(text);
  });
  let turn = owns.reduce((sum, each) => sum + each.filter((value, token) => value && begins(each, token)).length, 0);
  return parts.map((part) => ({ turn: part.isOwn ? turn++ : null, text: joined(part.texts) }));
}

// Whether somebody else wrote the token before.
const begins = (own, token) => token === 0 || Boolean(own[token]) !== Boolean(own[token - 1]);

function joined(texts) {
  const parts = [];
  for (let start = 0; start < texts.length;) {
    let end = start;
    while (end < texts.length && texts[end] === texts[start]) end += 1;
    parts.push(end - start >= REPEATED && texts[start].trim() ? `${texts[start]} × ${end - start} ` : texts.slice(start, end).join(""));
    start = end;
  }
  return parts.join("").trim();
}
