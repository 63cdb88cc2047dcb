// For pages that show what changes without a step: what differs is news, and false is none.

const SPANS_S = 10; // the server reads the spans of minutes each time

// A number that changes every `seconds` seconds.
export const every = (seconds) => Math.floor(Date.now() / 1000 / seconds);

// For spans, which come all the time while a run goes on.
export const newSpans = (run) => run?.is_running && every(SPANS_S);
