// Keys that go through places in a row, and that zoom.

export const NEARER = 0.8; // what a zoom makes of the length that is shown
export const FARTHER = 1.25;

// What a key makes of the length that is shown; undefined if it does not zoom. With Ctrl it is the browser's.
export const zoomFactor = ({ key, ctrlKey, metaKey, altKey }) =>
  ctrlKey || metaKey || altKey ? undefined : { "+": NEARER, "=": NEARER, "-": FARTHER }[key];

// The place to which a key leads from `place` among first to last; null if the key leads nowhere. From none, null, an
// arrow leads to an end.
export function placeAfter(key, place, first, last) {
  const next = { ArrowRight: (place ?? first - 1) + 1, ArrowLeft: (place ?? last + 1) - 1, Home: first, End: last }[key];
  return next === undefined ? null : Math.max(first, Math.min(last, next));
}
