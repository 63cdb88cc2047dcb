// Numbers as people read them.

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0 || Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const size = Math.abs(value);
  return size < 1e-3 || size >= 1e6 ? value.toExponential(digits > 3 ? 2 : 1) : String(Number(value.toPrecision(digits)));
}

const SPACE = "\u00a0"; // a number and its unit stay on one line

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${(1000 * value).toFixed(0)}${SPACE}ms`;
  if (value < 90) return `${value.toFixed(1)}${SPACE}s`;
  if (value < 5400) return `${(value / 60).toFixed(1)}${SPACE}min`;
  return `${(value / 3600).toFixed(1)}${SPACE}h`;
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
