// A sequence as people read it: what the policy wrote and what the environment answered, in turn.

import { array } from "./api.js";
import { h } from "./dom.js";

// Returns null where the environment added nothing to the sequence at `place`; `turns` are the sample's, and `picture`
// makes an element of the picture at a place among the sequence's.
export function conversation(sequences, place, turns, picture) {
  const said = messages(sequences, place);
  return said && h("details", { open: true }, h("summary", {}, "Conversation"),
    said.map(({ turn, content }, order) => h("div", { class: turn === null ? "message" : "message own" },
      h("b", {}, turn === null ? speaker(said, order, turns) : `policy, turn ${turn}`),
      content.map((each) => (typeof each === "number" ? picture(each) : each)))));
}

// How many of a sequence's pictures, the last ones, a conversation shows where they were seen; earlier releases noted no places.
export const numPlaced = ({ placeholders = [] }) => placeholders.length;

// The environment, with the tools that the turn before called.
function speaker(said, order, turns) {
  const before = said[order - 1]?.turn ?? (said[order + 1]?.turn ?? 0) - 1;
  const names = toolNames(turns[before] ?? {});
  return names ? `environment: ${names}` : "environment";
}

// The names of the tools that a turn called, each once; empty if it called none.
export const toolNames = ({ tools = [] }) => [...new Set(tools)].join(", ");

// What was said in the sequence, in order: texts, and of pictures the places among the sequence's. Each with its turn, which
// are counted over all sequences; null: the environment's.
export function messages(sequences, place) {
  const owns = sequences.slice(0, place + 1).map((sequence) => array(sequence.own, "u1"));
  const own = owns.pop();
  if (!own.includes(0)) return null;
  const { texts, images, placeholders = [] } = sequences[place];
  const pictures = new Map(placeholders.map((token, order) => [token, images.length - placeholders.length + order]));
  const parts = [];
  texts.forEach((text, token) => {
    if (begins(own, token)) parts.push({ isOwn: Boolean(own[token]), content: [""] });
    const { content } = parts.at(-1);
    if (pictures.has(token)) content.push(pictures.get(token), "");
    else content[content.length - 1] += text;
  });
  let turn = owns.reduce((sum, each) => sum + each.filter((value, token) => value && begins(each, token)).length, 0);
  return parts.map(({ isOwn, content }) => ({ turn: isOwn ? turn++ : null,
    content: content.map((each) => (typeof each === "number" ? each : each.trim())).filter((each) => each !== "") }));
}

// Whether somebody else wrote the token before.
const begins = (own, token) => token === 0 || Boolean(own[token]) !== Boolean(own[token - 1]);
