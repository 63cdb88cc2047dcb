// Chooses the page by the address behind #, and asks the server for news while the page is open.

import { get, Steps } from "./api.js";
import { forgetCharts } from "./chart.js";
import { empty, h } from "./dom.js";
import { exported } from "./exported.js";
import { seconds } from "./format.js";
import alarms from "./pages/alarms.js";
import curves from "./pages/curves.js";
import evaluation from "./pages/evaluation.js";
import fleet from "./pages/fleet.js";
import group from "./pages/group.js";
import samples from "./pages/samples.js";
import settings from "./pages/settings.js";
import staleness from "./pages/staleness.js";
import timeline from "./pages/timeline.js";

const PAGES = { curves, samples, group, timeline, staleness, fleet, evaluation, settings, alarms };
const LINKED = Object.keys(PAGES).filter((name) => name !== "group");
const EVERY_MS = 2000;

const context = {
  runs: [],
  steps: [],
  run: 0,
  parameters: new URLSearchParams(),
  // Changes parameters of the address; the page is drawn again.
  go(changes, page = current()) {
    const parameters = new URLSearchParams(page === current() ? this.parameters : { run: this.run });
    for (const [key, value] of Object.entries(changes)) {
      if (value === "" || value === null || value === undefined) parameters.delete(key);
      else parameters.set(key, value);
    }
    location.hash = `${page}?${parameters}`;
  },
  // Draws the page again.
  again() {
    draw();
  },
  link(page, parameters = {}) {
    return `#${page}?${new URLSearchParams({ run: this.run, ...parameters })}`;
  },
};

const current = () => location.hash.slice(1).split("?")[0] || "curves";

// Made once: a click is lost if its link is replaced between the button's way down and up.
const count = h("span", { class: "count", hidden: true }); // of alarms
const links = LINKED.map((name) => h("a", {}, PAGES[name].title, name === "alarms" ? count : null));

let drawn = ""; // the page that is shown
let seen = ""; // the page's news when it was drawn
let isStale = false; // steps have come that it does not show
let hasFailed = false; // an error that may pass is shown in its place
let isTouched = false; // somebody has begun to use its fields since it was drawn
let turn = 0; // number of the drawing that was begun last: an earlier one that ends later shows nothing

async function draw() {
  const mine = ++turn;
  const [name, query] = location.hash.slice(1).split("?");
  context.parameters = new URLSearchParams(query ?? "");
  const run = Number(context.parameters.get("run"));
  context.run = Number.isInteger(run) && run > 0 ? Math.min(run, context.runs.length - 1) : 0;
  const page = PAGES[name || "curves"];
  seen = newsOf(page);
  isStale = false;
  hasFailed = false;
  drawHeader();
  const root = document.getElementById("page");
  if (!page) {
    root.replaceChildren(empty(`There is no page ${name}.`));
    return;
  }
  try {
    const shown = await page.draw(context);
    if (mine !== turn) return;
    const focused = controls(root).indexOf(document.activeElement);
    const places = tables(root).map((each) => each.scrollLeft);
    root.replaceChildren(h("h1", {}, page.title), ...[shown].flat());
    forgetCharts();
    if (drawn === current()) {
      controls(root)[focused]?.focus({ preventScroll: true });
      tables(root).forEach((each, order) => { each.scrollLeft = places[order] ?? 0; });
    } else if (drawn) {
      scrollTo(0, 0); // where the page before was left is no place of this one
      root.focus({ preventScroll: true });
    }
    if (drawn !== current()) showLink();
    drawn = current();
    isTouched = false;
    document.title = `${page.title} · ${context.runs[context.run]?.name ?? "Penstock"}`;
  } catch (error) {
    if (mine !== turn) return;
    hasFailed = !error.isFinal;
    showError(error);
  }
}

// An error that is shown already stays: a screen reader would read a new element out again.
function showError(error) {
  const root = document.getElementById("page");
  const shown = h("p", { class: "error", role: "alert" }, error.message);
  if (!shown.isEqualNode(root.firstChild)) root.replaceChildren(shown);
}

function drawHeader() {
  drawLinks();
  const choice = document.getElementById("run");
  if (choice.options.length !== context.runs.length) {
    choice.replaceChildren(...context.runs.map((run) => h("option", { value: run.number }, run.name)));
  }
  choice.value = context.run;
  choice.onchange = () => context.go({ run: choice.value });
  const run = context.runs[context.run];
  const state = exported ? "exported" : run?.is_running ? "running" : "not running";
  const left = !exported && run?.left_s ? ` · about ${seconds(run.left_s)} left` : "";
  document.getElementById("status").textContent = run
    ? `${state} · step ${run.step}${run.num_steps ? ` of ${run.num_steps}` : ""}${left}` : "";
  if (exported) {
    const leftOut = exported.leftOut(context.run);
    const note = document.getElementById("note");
    note.hidden = false;
    note.textContent = `Exported ${exported.time}. ${leftOut.length ? `Left out: ${leftOut.join("; ")}.` : "Nothing was left out."}`;
  }
}

function drawLinks() {
  const shown = current() === "group" ? "samples" : current();
  LINKED.forEach((name, order) => {
    links[order].href = context.link(name);
    if (name === shown) links[order].setAttribute("aria-current", "page");
    else links[order].removeAttribute("aria-current");
  });
  const number = context.runs[context.run]?.num_alarms ?? 0;
  count.hidden = number === 0;
  count.textContent = number;
  count.setAttribute("aria-label", `: ${number}`);
}

// On a phone the pages' list is wider than the screen. scrollIntoView would move the place from which Tab goes on.
function showLink() {
  const nav = document.getElementById("nav");
  const link = nav.querySelector("[aria-current]");
  if (link) nav.scrollLeft = link.offsetLeft - nav.offsetLeft - (nav.clientWidth - link.offsetWidth) / 2;
}

const controls = (root) => [...root.querySelectorAll("a[href], button, input, select, [tabindex]")];

// Whether somebody has marked text of the page, to copy it.
const isMarked = () => !getSelection().isCollapsed && getSelection().containsNode(document.getElementById("page"), true);

// What the page shows besides steps, in short: where this changes, it is drawn again.
const newsOf = (page) => String(page?.news?.(context) ?? "");

const foldersOf = (runs) => JSON.stringify(runs.map((run) => run.folder));

// Wide ones scroll by themselves.
const tables = (root) => [...root.querySelectorAll(".scroll")];

async function poll() {
  try {
    const runs = await get("api/runs");
    if (foldersOf(runs) !== foldersOf(context.runs)) { // another server answers at this address
      location.reload();
      return;
    }
    context.runs = runs;
    const isNew = await Promise.all(context.steps.map((steps) => steps.poll()));
    isStale ||= isNew.some(Boolean);
    drawHeader();
    const isBusy = isMarked() || (isTouched && document.querySelector("#page :focus"));
    const page = PAGES[current()];
    const isOld = page?.isLive(context) && (isStale || newsOf(page) !== seen);
    if ((hasFailed || isOld) && !isBusy) await draw();
  } catch (error) {
    document.getElementById("status").textContent = `no answer: ${error.message}`;
  }
  setTimeout(poll, EVERY_MS);
}

// The system's wish, until somebody presses the button.
function followTheme() {
  const wish = matchMedia("(prefers-color-scheme: dark)");
  const show = (name) => { document.documentElement.dataset.theme = name; };
  show(remembered() ?? (wish.matches ? "dark" : "light"));
  wish.onchange = () => {
    if (remembered()) return;
    show(wish.matches ? "dark" : "light");
    draw();
  };
  document.getElementById("theme").onclick = () => {
    const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    show(name);
    remembered(name);
    draw();
  };
}

// Returns the theme that was chosen, or notes it; a page that was opened from a file may have no storage.
function remembered(name) {
  try {
    if (name) localStorage.setItem("theme", name);
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
}

// Reads the runs, asking again until the server answers, draws the first page and goes on to ask for news.
async function start() {
  try {
    context.runs = await get("api/runs");
    context.steps = context.runs.map((run) => new Steps(run.number));
    await Promise.all(context.steps.map((steps) => steps.poll()));
  } catch (error) {
    showError(error);
    if (!exported) setTimeout(start, EVERY_MS);
    return;
  }
  document.getElementById("nav").append(...links);
  addEventListener("hashchange", draw);
  await draw();
  if (!exported) setTimeout(poll, EVERY_MS);
}

followTheme();
for (const kind of ["pointerdown", "keydown"]) document.getElementById("page").addEventListener(kind, () => { isTouched = true; });
// A click leaves the focus on a drawing, which loses nothing when it is drawn anew.
addEventListener("click", () => { if (document.activeElement.matches("canvas, .u-over")) isTouched = false; }, true);
start();
