// A sequence as people read it: what the policy wrote and what the environment answered, in turn.

import { array } from "./api.js";
import { h } from "./dom.js";

const REPEATED = 4; // equal tokens, from which they are counted: a picture is hundreds of them

// Returns null where the environment added nothing.
export function conversation(sequence) {
  const own = array(sequence.own, "u1");
  if (!own.includes(0)) return null;
  const parts = [];
  sequence.texts.forEach((text, place) => {
    const isOwn = Boolean(own[place]);
    if (parts.at(-1)?.isOwn !== isOwn) parts.push({ isOwn, texts: [] });
    parts.at(-1).texts.push(text);
  });
  let turn = -1;
  return h("details", { open: true }, h("summary", {}, "Conversation"), parts.map(({ isOwn, texts }) => {
    if (isOwn) turn += 1;
    return h("div", { class: isOwn ? "message own" : "message" }, h("b", {}, isOwn ? `policy, turn ${turn}` : "environment"), joined(texts));
  }));
}

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
