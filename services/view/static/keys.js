// Keys that go through places in a row.

// The place to which a key leads from `place` among first to last; null if the key leads nowhere. From none, null, an
// arrow leads to an end.
export function placeAfter(key, place, first, last) {
  const next = { ArrowRight: (place ?? first - 1) + 1, ArrowLeft: (place ?? last + 1) - 1, Home: first, End: last }[key];
  return next === undefined ? null : Math.max(first, Math.min(last, next));
}
