// Lanes of bars on one clock, which are zoomed, moved, and walked through by keys.

import { canvas } from "./canvas.js";
import { ink } from "./colours.js";
import { h } from "./dom.js";
import { seconds } from "./format.js";
import { FARTHER, NEARER, zoomFactor } from "./keys.js";

const LEFT = 130; // pixels of the lanes' names
const ROW = 9;
const GAP = 10;
const AXIS = 22;
const TALL = 216; // pixels of a lane, from which its rows are thinner
const STRIPE = 4; // pixels from one stripe of a failed bar to the next
const SHORTEST_S = 1e-3; // shown at least; seconds since 1970 have no digits for much less

let held = null; // {key, low, high, chosen} of the plot that was drawn last, once somebody has zoomed, moved or chosen
let noted = null; // the note of the plot that was drawn last, which says what the bar is that was pointed at

// Whether somebody has zoomed, moved or chosen in the plot `key`, which was drawn last: it is drawn anew as they left it.
export const isHeld = (key) => held?.key === key;

// The next plot is drawn whole.
export function release() {
  held = noted = null;
}

const rowOf = (lane) => Math.max(3, Math.min(ROW, Math.floor(TALL / lane.rows.length)));

// The lanes, each {name, rows}, whose rows are lists of bars: {start, length, colour, text, target, pale?, isFailed?}. The
// plot that is drawn next by the same key stays as it was left.
export function lanePlot(context, key, lanes) {
  if (held && !isHeld(key)) release();
  const all = lanes.flatMap((lane) => lane.rows.flat());
  const [first, end] = extent(all);
  let [low, high] = held ? [held.low, held.high] : [first, Math.max(end, first + SHORTEST_S)];
  const height = AXIS + lanes.reduce((sum, lane) => sum + lane.rows.length * rowOf(lane) + GAP, 0);
  let chosen = (held?.chosen && all.find((bar) => bar.start === held.chosen.start && bar.text === held.chosen.text)) ?? null; // by the keyboard
  const pointed = noted?.isConnected ? all.find((bar) => bar.text === noted.textContent) : null; // in the plot that this one replaces
  const note = h("p", { class: "faint", "aria-live": "polite" }, (chosen ?? pointed)?.text ?? " ");
  noted = note;
  let placed = [];
  const view = canvas(height, "Timeline of trainer and engines; the arrow keys go from bar to bar, Enter opens its sample, + and - zoom", (pen, width) => {
    const x = (time) => LEFT + ((time - low) / (high - low)) * (width - LEFT);
    pen.clearRect(0, 0, width, height);
    drawAxis(pen, width, height, low - first, high - first, x, first);
    placed = [];
    const [paper, dark] = [ink("paper"), ink("ink")];
    let y = AXIS;
    for (const lane of lanes) {
      pen.fillStyle = dark;
      pen.fillText(lane.name.length > 20 ? `…${lane.name.slice(-19)}` : lane.name, 4, y + ROW);
      const tall = rowOf(lane);
      const thick = tall > 4 ? tall - 2 : tall - 1;
      for (const row of lane.rows) {
        for (const bar of row) {
          const left = Math.max(LEFT, x(bar.start));
          const right = Math.min(width, Math.max(x(bar.start + bar.length), left + 1));
          if (right <= LEFT || left >= width) continue;
          pen.fillStyle = bar.colour;
          pen.fillRect(left, y, right - left, thick);
          if (bar.pale) {
            const until = Math.min(right, x(bar.start + bar.pale));
            pen.fillStyle = paper;
            pen.globalAlpha = 0.65;
            if (until > left) pen.fillRect(left, y, until - left, thick);
            pen.globalAlpha = 1;
          }
          if (bar.isFailed) strike(pen, left, y, right - left, thick, paper, dark);
          if (bar === chosen) {
            pen.strokeStyle = dark;
            pen.lineWidth = 2;
            pen.strokeRect(left - 1, y - 1, right - left + 2, thick + 2);
            pen.lineWidth = 1;
          }
          placed.push({ bar, left, right, top: y, bottom: y + tall });
        }
        y += tall;
      }
      y += GAP;
    }
  });
  const hold = () => {
    held = { key, low, high, chosen };
    view.redraw();
  };
  const at = (event) => placed.find(({ left, right, top, bottom }) =>
    event.offsetX >= left - 1 && event.offsetX <= right + 1 && event.offsetY >= top && event.offsetY < bottom)?.bar;
  const open = (bar) => { if (bar?.target) context.go(bar.target, "group"); };
  const point = (event) => {
    const bar = at(event);
    note.textContent = bar?.text ?? " ";
    return bar;
  };
  let drag = null;
  let hasMoved = false;
  view.surface.onpointermove = (event) => {
    if (drag) {
      hasMoved ||= Math.abs(drag.x - event.offsetX) > 3;
      if (!hasMoved) return;
      const shift = ((drag.x - event.offsetX) / (view.box.clientWidth - LEFT)) * (high - low);
      [low, high] = [drag.low + shift, drag.high + shift];
      hold();
      return;
    }
    const bar = point(event);
    view.surface.style.cursor = bar?.target ? "pointer" : "default";
  };
  view.surface.onpointerdown = (event) => {
    drag = { x: event.offsetX, low, high };
    hasMoved = false;
    view.surface.setPointerCapture(event.pointerId);
  };
  view.surface.onpointerup = view.surface.onpointercancel = () => { drag = null; };
  view.surface.onclick = (event) => { if (!hasMoved) open(point(event)); }; // a finger points by its tap
  const zoom = (middle, factor) => {
    [low, high] = zoomed(low, high, middle, factor);
    hold();
  };
  const zoomHere = (factor) => zoom(chosen ? chosen.start : (low + high) / 2, factor);
  view.surface.addEventListener("wheel", (event) => {
    if (Math.abs(event.deltaX) >= Math.abs(event.deltaY)) return; // a swipe to the side is the browser's
    event.preventDefault();
    const share = Math.max(0, (event.offsetX - LEFT) / (view.box.clientWidth - LEFT));
    zoom(low + share * (high - low), event.deltaY > 0 ? FARTHER : NEARER);
  }, { passive: false });
  const choose = (bar) => {
    chosen = bar;
    note.textContent = bar.text;
    if (bar.start < low || bar.start > high) [low, high] = [bar.start - (high - low) / 2, bar.start + (high - low) / 2];
    hold();
  };
  view.surface.tabIndex = 0;
  view.surface.onkeydown = (event) => {
    if (event.key === "Enter") open(chosen);
    const factor = zoomFactor(event);
    if (factor) zoomHere(factor);
    const next = neighbour(lanes, chosen, event.key);
    if (!next) return;
    event.preventDefault();
    choose(next);
  };
  const button = (text, act) => h("button", { type: "button", onclick: act }, text);
  return h("div", {}, h("div", { class: "tools" },
    button("zoom in", () => zoomHere(NEARER ** 3)), button("zoom out", () => zoomHere(FARTHER ** 3)),
    button("show all", () => { release(); context.again(); })), view.box, note);
}

// Marks a bar as failed with stripes and an outline: every hue is some group's, and not everybody can tell hues apart.
function strike(pen, left, top, width, height, paper, dark) {
  pen.save();
  pen.beginPath();
  pen.rect(left, top, width, height);
  pen.clip();
  pen.beginPath();
  for (let place = left - height; place < left + width; place += STRIPE) {
    pen.moveTo(place, top + height);
    pen.lineTo(place + height, top);
  }
  pen.strokeStyle = paper;
  pen.stroke();
  pen.restore();
  pen.strokeStyle = dark;
  pen.strokeRect(left + 0.5, top + 0.5, Math.max(0, width - 1), height - 1);
}

// When the first of them begins and the last one ends. A function takes no more than about 100,000 arguments.
export function extent(spans) {
  let [first, end] = [Infinity, -Infinity];
  for (const { start, length } of spans) [first, end] = [Math.min(first, start), Math.max(end, start + length)];
  return [first, end];
}

// Begin and end of the time that is shown after a zoom around `middle`: never less than SHORTEST_S.
export function zoomed(low, high, middle, factor) {
  const scale = Math.max(factor, SHORTEST_S / (high - low));
  return [middle - (middle - low) * scale, middle + (high - middle) * scale];
}

// The bar to which an arrow key leads: along the lane, or to the one of the next lane that begins next.
export function neighbour(lanes, chosen, key) {
  const ordered = lanes.map((lane) => lane.rows.flat().sort((a, b) => a.start - b.start)).filter((bars) => bars.length);
  if (!key.startsWith("Arrow") || !ordered.length) return null;
  const order = ordered.findIndex((bars) => bars.includes(chosen));
  if (order === -1) return ordered[0][0];
  const place = ordered[order].indexOf(chosen);
  if (key === "ArrowRight" || key === "ArrowLeft") return ordered[order][place + (key === "ArrowRight" ? 1 : -1)] ?? null;
  const other = ordered[order + (key === "ArrowDown" ? 1 : -1)];
  return other && (other.find((bar) => bar.start >= chosen.start) ?? other.at(-1));
}

function drawAxis(pen, width, height, low, high, x, first) {
  const wanted = (high - low) / Math.max(2, (width - LEFT) / 110);
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= wanted);
  pen.strokeStyle = ink("line");
  pen.fillStyle = ink("faint");
  for (let tick = Math.ceil(low / step); tick * step <= high; tick += 1) {
    const place = x(first + tick * step);
    if (place < LEFT) continue;
    pen.beginPath();
    pen.moveTo(place, AXIS - 6);
    pen.lineTo(place, height);
    pen.stroke();
    pen.fillText(seconds(tick * step, step), place + 3, 13);
  }
}
