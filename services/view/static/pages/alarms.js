// What is wrong with the run, and what helps.

import { get } from "../api.js";
import { empty, h } from "../dom.js";
import { every } from "../news.js";

const STUCK_SHOWN_S = 30;

export default {
  title: "Alarms",
  isLive: () => true,
  news: (context) => {
    const kinds = context.runs[context.run]?.alarm_kinds ?? [];
    return [...kinds, kinds.includes("stuck") && every(STUCK_SHOWN_S)]; // its text says for how long
  },
  async draw(context) {
    const alarms = await get(`api/runs/${context.run}/alarms`);
    if (!alarms.length) return empty("Nothing is wrong that these rules know of.");
    return alarms.map((alarm) => h("div", { class: "alarm", role: "alert" },
      h("p", {}, h("b", {}, alarm.kind), ` at step ${alarm.step}: ${alarm.text}`),
      h("p", { class: "faint" }, alarm.remedy),
      h("p", {}, h("a", { href: context.link("samples", { step: alarm.step }) }, "samples of this step"), " · ",
        h("a", { href: context.link("timeline", { to: alarm.step }) }, "timeline"))));
  },
};
