// For pages that show what changes with time alone: a number that changes every `seconds` seconds.

export const every = (seconds) => Math.floor(Date.now() / 1000 / seconds);
