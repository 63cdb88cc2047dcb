// Chooses the page by the address behind #, and asks the server for news while the page is open.

import { get, Steps } from "./api.js";
import { empty, h } from "./dom.js";
import alarms from "./pages/alarms.js";
import curves from "./pages/curves.js";
import evaluation from "./pages/evaluation.js";
import group from "./pages/group.js";
import samples from "./pages/samples.js";
import settings from "./pages/settings.js";
import staleness from "./pages/staleness.js";
import timeline from "./pages/timeline.js";

const PAGES = { curves, samples, group, timeline, staleness, evaluation, settings, alarms };
const LINKED = ["curves", "samples", "timeline", "staleness", "evaluation", "settings", "alarms"];
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
  link(page, parameters = {}) {
    return `#${page}?${new URLSearchParams({ run: this.run, ...parameters })}`;
  },
};

const current = () => location.hash.slice(1).split("?")[0] || "curves";

async function draw() {
  const [name, query] = location.hash.slice(1).split("?");
  context.parameters = new URLSearchParams(query ?? "");
  context.run = Math.min(Number(context.parameters.get("run") ?? 0) || 0, context.runs.length - 1);
  const page = PAGES[name || "curves"];
  drawHeader();
  const root = document.getElementById("page");
  if (!page) {
    root.replaceChildren(empty(`There is no page ${name}.`));
    return;
  }
  try {
    const shown = await page.draw(context);
    root.replaceChildren(h("h1", {}, page.title), ...[shown].flat());
    document.title = `${page.title} · ${context.runs[context.run]?.name ?? "Penstock"}`;
  } catch (error) {
    root.replaceChildren(h("p", { class: "error", role: "alert" }, error.message));
  }
}

function drawHeader() {
  const shown = current() === "group" ? "samples" : current();
  document.getElementById("nav").replaceChildren(...LINKED.map((name) => {
    const count = name === "alarms" ? context.runs[context.run]?.num_alarms : 0;
    return h("a", { href: context.link(name), "aria-current": name === shown ? "page" : undefined },
      PAGES[name].title, count ? h("span", { class: "count" }, String(count)) : null);
  }));
  const choice = document.getElementById("run");
  choice.replaceChildren(...context.runs.map((run) =>
    h("option", { value: run.number, selected: run.number === context.run }, run.name)));
  choice.onchange = () => context.go({ run: choice.value });
  const run = context.runs[context.run];
  document.getElementById("status").textContent = run
    ? `${run.is_running ? "running" : "not running"} · step ${run.step}${run.num_steps ? ` of ${run.num_steps}` : ""}` : "";
}

async function poll() {
  try {
    context.runs = await get("api/runs");
    const isNew = await Promise.all(context.steps.map((steps) => steps.poll()));
    drawHeader();
    if (isNew.some(Boolean) && PAGES[current()]?.isLive && !document.querySelector("#page :focus")) await draw();
  } catch (error) {
    document.getElementById("status").textContent = `no answer: ${error.message}`;
  }
  setTimeout(poll, EVERY_MS);
}

function chooseTheme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem("theme", name);
}

async function start() {
  const preferred = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  chooseTheme(localStorage.getItem("theme") ?? preferred);
  document.getElementById("theme").onclick = () => {
    chooseTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    draw();
  };
  try {
    context.runs = await get("api/runs");
    context.steps = context.runs.map((run) => new Steps(run.number));
    await Promise.all(context.steps.map((steps) => steps.poll()));
  } catch (error) {
    document.getElementById("page").replaceChildren(h("p", { class: "error", role: "alert" }, error.message));
    return;
  }
  addEventListener("hashchange", draw);
  await draw();
  setTimeout(poll, EVERY_MS);
}

start();
