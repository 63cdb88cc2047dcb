// Numbers as people read them.

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0 || Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const size = Math.abs(value);
  return size < 1e-3 || size >= 1e6 ? value.toExponential(digits > 3 ? 2 : 1) : String(Number(value.toPrecision(digits)));
}

const SPACE = "\u00a0"; // a number and its unit stay on one line

// A duration; of ticks that are `step` seconds apart, with the decimals that tell them apart.
export function seconds(value, step) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const [unit, unitS, digits] = size < 1 ? ["ms", 1e-3, 0] : size < 90 ? ["s", 1, 1] : size < 5400 ? ["min", 60, 1] : ["h", 3600, 1];
  return `${(value / unitS).toFixed(step === undefined ? digits : decimals(step / unitS))}${SPACE}${unit}`;
}

// The label of a tick of an axis whose ticks are `step` apart, with the decimals that tell them apart.
export function tickLabel(value, step) {
  const rounded = Number(value.toFixed(decimals(step)));
  const size = Math.abs(rounded);
  return size > 0 && (size < 1e-3 || size >= 1e6) ? rounded.toExponential() : String(rounded);
}

// Decimals of the first two digits of a step: none of 10, one of 2.5, two of 0.25.
function decimals(step) {
  const [digits, exponent] = step.toExponential(1).split("e");
  return Math.min(100, Math.max(0, (digits.endsWith(".0") ? 0 : 1) - Number(exponent)));
}

export function mean(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

export function smooth(values, weight) {
  // Exponential mean, corrected for its start; gaps stay gaps, and places of other runs undefined.
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}
