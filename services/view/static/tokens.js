// The tokens of a sequence, coloured by one of their numbers.

import { array } from "./api.js";
import { diverging, sequential } from "./colours.js";
import { h, select } from "./dom.js";
import { number } from "./format.js";
import { placeAfter } from "./keys.js";

const CHUNK = 1000; // tokens that are made at once, when they come into sight
const LINE_PX = 27;
const CHARACTERS_A_LINE = 110;

const VIEWS = [
  ["dlogp", "trainer − engine", (token) => token.dlogp, (value, most) => diverging(value / (most || 1))],
  ["ratio", "ratio to the anchor", (token) => token.ratio, (value) => diverging(Math.log(value) / Math.log(2))],
  ["lag", "age in versions", (token) => token.lag, (value, most) => sequential(value / Math.max(1, most))],
  ["advantages", "advantage", (token) => token.advantages, (value, most) => diverging(value / (most || 1))],
  ["engine", "surprise of the engine", (token) => (token.engine === null ? null : -token.engine), (value) => sequential(value / 5)],
  ["entropy", "entropy", (token) => token.entropy, (value) => sequential(value / 3)],
];

export function tokenView(context, prompt, sequence, version) {
  const tokens = readTokens(prompt, sequence, version);
  const { known, view, most } = viewOf(tokens, context.parameters.get("colour") ?? "dlogp");
  const hover = h("div", { class: "hover", "aria-live": "polite" }, h("span", { class: "faint" }, "Point at a token to see its numbers."));
  const box = h("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens; the arrow keys go from one to the next" });
  let chosen = null;
  const choose = (place) => {
    if (place < 0 || place >= tokens.length) return;
    box.querySelector(".chosen")?.classList.remove("chosen");
    chosen = place;
    showChunk(Math.floor(place / CHUNK));
    const element = box.querySelector(`[data-n="${place}"]`);
    element.classList.add("chosen");
    element.scrollIntoView({ block: "nearest" });
    hover.replaceChildren(...describe(tokens[place], place));
  };
  const chunks = [];
  const showChunk = (order) => {
    const chunk = chunks[order];
    if (chunk.childNodes.length) return;
    chunk.style.removeProperty("min-height");
    chunk.append(...tokens.slice(order * CHUNK, (order + 1) * CHUNK).map((token, offset) => element(token, order * CHUNK + offset, view, most)));
  };
  for (let start = 0; start < tokens.length; start += CHUNK) {
    const length = tokens.slice(start, start + CHUNK).reduce((sum, token) => sum + token.text.length, 0);
    const height = `${Math.ceil(length / CHARACTERS_A_LINE) * LINE_PX}px`;
    const chunk = h("span", { class: "chunk", style: { display: tokens.length > CHUNK ? "block" : "inline",
      "min-height": height, "contain-intrinsic-block-size": `auto ${height}` } }); // before it is made, and while it is out of sight
    chunks.push(chunk);
    box.append(chunk);
  }
  const sight = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) showChunk(chunks.indexOf(entry.target));
  }, { rootMargin: "600px" });
  chunks.forEach((chunk) => sight.observe(chunk));
  if (chunks.length) showChunk(0);
  box.onmouseover = (event) => {
    const place = event.target.dataset?.n;
    if (place !== undefined) hover.replaceChildren(...describe(tokens[place], Number(place)));
  };
  box.onclick = (event) => {
    if (event.target.dataset?.n !== undefined) choose(Number(event.target.dataset.n));
  };
  box.onkeydown = (event) => {
    const place = placeAfter(event.key, chosen, 0, tokens.length - 1);
    if (place === null) return;
    event.preventDefault();
    choose(place);
  };
  const worst = () => {
    if (!tokens.some((token) => token.dlogp !== null)) return;
    const values = tokens.map((token) => (token.dlogp === null ? -1 : Math.abs(token.dlogp)));
    choose(values.reduce((best, value, place) => (value > values[best] ? place : best), 0));
  };
  if (context.parameters.get("at") === "difference") requestAnimationFrame(worst); // when the page holds it
  return h("div", {},
    h("div", { class: "tools" },
      view ? select("Colour", view[0], known.map(([name, text]) => [name, text]), (colour) => context.go({ colour })) : null,
      view ? legend(view, most) : null,
      tokens.some((token) => token.dlogp !== null)
        ? h("button", { type: "button", onclick: worst }, "go to the largest difference") : null,
      h("span", { class: "faint" }, "Pale: not the policy's own. Dotted: no gradient.")),
    box, hover);
}

// The tokens of prompt and sequence, each with its numbers; null where it has none.
export function readTokens(prompt, sequence, version) {
  const shared = (prompt.texts ?? []).map((text, place) => ({ text, id: place, own: false, trained: null, ...NOTHING }));
  const promptIds = array(prompt.token_ids, "i4");
  shared.forEach((token, place) => { token.id = promptIds[place]; });
  const ids = array(sequence.token_ids, "i4");
  const own = array(sequence.own, "u1");
  const columns = {
    engine: array(sequence.engine_logprobs, "f4"), logprob: array(sequence.logprobs, "f4"), ratio: array(sequence.ratio, "f4"),
    correction: array(sequence.correction, "f4"), advantages: array(sequence.advantages, "f4"), entropy: array(sequence.entropy, "f4"),
  };
  const trained = array(sequence.trained, "u1");
  const versions = sequence.versions.flatMap(([count, value]) => Array(count).fill(value));
  let next = 0;
  const rest = sequence.texts.map((text, place) => {
    if (!own[place]) return { text, id: ids[place], own: false, trained: null, ...NOTHING };
    const token = { text, id: ids[place], own: true, trained: trained ? Boolean(trained[next]) : null, version: versions[next],
      lag: version - versions[next] };
    for (const [name, values] of Object.entries(columns)) token[name] = values ? values[next] : null;
    token.dlogp = token.logprob === null ? null : token.logprob - token.engine;
    next += 1;
    return token;
  });
  return [...shared, ...rest];
}

const NOTHING = { engine: null, logprob: null, ratio: null, correction: null, advantages: null, entropy: null, dlogp: null, lag: null, version: null };

// The views for which the tokens have numbers, the one that is shown if `asked` is asked for, and its largest number by size.
export function viewOf(tokens, asked) {
  const known = VIEWS.filter(([, , value]) => tokens.some((token) => value(token) !== null));
  const named = (wanted) => known.find(([name]) => name === wanted);
  const view = named(asked) ?? named("engine") ?? known[0];
  const sizes = view ? tokens.map((token) => Math.abs(view[2](token) ?? 0)) : [];
  return { known, view, most: sizes.reduce((most, size) => (size > most ? size : most), 0) };
}

function element(token, place, view, most) {
  const value = view ? view[2](token) : null;
  const kind = token.own ? (token.trained === false ? "untrained" : undefined) : "foreign";
  return h("span", { "data-n": place, class: kind, style: value === null ? {} : { background: view[3](value, most) } }, visible(token.text));
}

const visible = (text) => (text === "" ? "" : text.replaceAll("\n", "⏎\n"));

function describe(token, place) {
  const part = (name, value) => h("span", {}, `${name} `, h("b", {}, value));
  const facts = [part("token", JSON.stringify(token.text)), part("id", String(token.id)), part("place", String(place))];
  if (!token.own) return [...facts, h("span", { class: "faint" }, "not the policy's own")];
  for (const [name, key] of [["engine", "engine"], ["trainer", "logprob"], ["difference", "dlogp"], ["ratio", "ratio"],
    ["importance weight", "correction"], ["advantage", "advantages"], ["entropy", "entropy"], ["version", "version"], ["age", "lag"]]) {
    if (token[key] !== null) facts.push(part(name, number(token[key])));
  }
  if (token.trained !== null) facts.push(part("gradient", token.trained ? "yes" : "no"));
  return facts;
}

// What the ends of a view's scale are, and its colours from one to the other.
export function scaleOf([name], most) {
  const colours = [-1, -0.5, 0, 0.5, 1].map((value) => (["lag", "engine", "entropy"].includes(name) ? sequential((value + 1) / 2) : diverging(value)));
  const [low, high] = { ratio: ["½", "2"], lag: ["0", number(Math.max(1, most))], engine: ["0", "5 nats"], entropy: ["0", "3 nats"] }[name]
    ?? [number(-most, 2), number(most, 2)];
  return { low, high, colours };
}

function legend(view, most) {
  const { low, high, colours } = scaleOf(view, most);
  return h("span", { class: "legend" }, low, h("span", { class: "scale", style: { background: `linear-gradient(90deg, ${colours.join(",")})` } }), high);
}
