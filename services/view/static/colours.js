// Colours that people with any kind of colour vision can tell apart (Okabe and Ito 2008), and scales for tokens.

export const SERIES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999"];
export const PARTS = {
  train_s: "#0072b2", wait_s: "#e69f00", data_wait_s: "#f0e442", demonstration_wait_s: "#999999",
  push_wait_s: "#d55e00", checkpoint_wait_s: "#cc79a7", evaluation_wait_s: "#009e73", push: "#d55e00",
};

const BLUE = [0, 114, 178];
const ORANGE = [213, 94, 0];

// From -1 (blue) over 0 (nothing) to 1 (orange).
export function diverging(value) {
  const strength = Math.min(1, Math.abs(value));
  const [red, green, blue] = value < 0 ? BLUE : ORANGE;
  return `rgb(${red} ${green} ${blue} / ${(0.75 * strength).toFixed(3)})`;
}

export function sequential(value) {
  return diverging(Math.max(0, value));
}

export function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
