// Colours that people with any kind of colour vision can tell apart, on light and on dark paper, and scales for tokens.

// Any two differ by 18 at least in CIELAB for every kind of colour vision, and each has a contrast of 3 to both papers. The
// last one is grey.
export const SERIES = ["#2d94ff", "#e57410", "#00925a", "#cd72c8", "#8e5902", "#49688c", "#774dbd", "#828993"];
const [BLUE, ORANGE, GREEN, PINK, BROWN, SLATE, PURPLE, GREY] = SERIES;

export const PARTS = {
  train_s: BLUE, wait_s: ORANGE, data_wait_s: BROWN, demonstration_wait_s: GREY,
  push_wait_s: PURPLE, checkpoint_wait_s: PINK, evaluation_wait_s: GREEN, push: SLATE,
};

const NEGATIVE = [0, 114, 178];
const POSITIVE = [213, 94, 0];

// From -1 (blue) over 0 (nothing) to 1 (orange), of Okabe and Ito 2008.
export function diverging(value) {
  const strength = Math.min(1, Math.abs(value));
  const [red, green, blue] = value < 0 ? NEGATIVE : POSITIVE;
  return `rgb(${red} ${green} ${blue} / ${(0.75 * strength).toFixed(3)})`;
}

export function sequential(value) {
  return diverging(Math.max(0, value));
}

export function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
