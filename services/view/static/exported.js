// Answers from the data in an exported page as the server does; null where a server answers.

const data = document.getElementById("exported");

export const exported = data && open(JSON.parse(data.textContent));

function open({ exported: time, runs }) {
  const steps = runs.map((run) => rows(run.steps));
  const answers = {
    steps: (run, number, { after = 0 }) => ({ generation: 0, num_rows: steps[number].length, start: Number(after), rows: steps[number].slice(after) }),
    episodes: (run, _, parameters) => filter(run, parameters),
    spans: (run, _, { first_step = 0, last_step = Infinity }) => run.index.filter((entry) => isBetween(entry.step, first_step, last_step)),
    trace: (run, _, { first_step = 0, last_step = Infinity }) => run.trace.filter((step) => isBetween(step.step, first_step, last_step)),
    processes: (run, _, { first, last = Infinity }) => ({ num_left_out: 0,
      spans: run.processes.filter((span) => span.start <= last && span.start + span.length >= first),
      losses: run.losses.filter((loss) => loss.start <= last && loss.end >= first) }),
  };
  return {
    time,
    leftOut: (number) => runs[number]?.left_out ?? [],
    get(path, parameters) {
      if (path === "api/runs") return runs.map((run) => run.about);
      const [, , number, what, place] = path.split("/");
      const run = runs[number];
      if (place !== undefined) {
        if (!run.episodes[place]) throw new Error("this group was left out of the file");
        return run.episodes[place];
      }
      return answers[what] ? answers[what](run, Number(number), parameters) : run[what];
    },
    image: (number, name) => runs[number].images[name] ?? "",
  };
}

const isBetween = (step, first, last) => step >= Number(first) && step <= Number(last);

function rows(columns) {
  const names = Object.entries(columns);
  return Array.from({ length: columns.step?.length ?? 0 }, (_, place) => Object.fromEntries(
    names.filter(([, values]) => values[place] !== null).map(([name, values]) => [name, values[place]])));
}

const known = (values) => values.filter((value) => value !== null);
const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
const ORDERS = {
  step: (entry) => entry.step,
  index: (entry) => entry.index,
  reward: (entry) => mean(known(entry.rewards)),
  lowest: (entry) => (known(entry.rewards).length ? [Math.min(...known(entry.rewards)), mean(known(entry.rewards))] : null),
  spread: (entry) => (known(entry.rewards).length ? Math.max(...known(entry.rewards)) - Math.min(...known(entry.rewards)) : null),
  tokens: (entry) => Math.max(0, ...entry.num_tokens),
  turns: (entry) => Math.max(0, ...entry.num_turns),
  dlogp: (entry) => entry.dlogp_max,
  lag: (entry) => (entry.versions.length ? entry.version - entry.versions[0] : null),
};

// Of two numbers, or of two lists of numbers by the first in which they differ.
function compared(one, other) {
  if (!Array.isArray(one)) return one - other;
  return one.map((value, place) => value - other[place]).find(Boolean) ?? 0;
}

function hasAll(words, entry, { messages, samples }) {
  const all = [entry.prompt, entry.reason, entry.error, ...entry.golds, ...messages.map((each) => each.content),
    ...samples.map((each) => each.text)].join("\n").toLowerCase();
  return words.every((word) => all.includes(word));
}

// As services/view/episode_query.py does on a server.
function filter(run, { outcome = "", step = "", row = "", finish = "", text = "", sort = "", descending = "", start = 0, limit = 100 }) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (entry) => {
    if (outcome && entry.outcome !== outcome) return false;
    if (step !== "" && entry.step !== Number(step)) return false;
    if (row && `${entry.source}/${entry.row}` !== row) return false;
    if (finish && !entry.finish.includes(finish)) return false;
    return !words.length || hasAll(words, entry, run.episodes[entry.number]);
  };
  const value = ORDERS[sort || "step"];
  const sign = descending === "false" ? 1 : -1;
  const found = run.index.filter(matches).sort((a, b) => {
    const [one, other] = [value(a), value(b)];
    if (one === null || other === null) return one === other ? a.number - b.number : one === null ? 1 : -1;
    return sign * (compared(one, other) || a.number - b.number);
  });
  const first = Number(start) || 0;
  return { num_kept: run.num_kept, num_found: found.length, num_unsearched: 0, found: found.slice(first, first + Number(limit)) };
}
