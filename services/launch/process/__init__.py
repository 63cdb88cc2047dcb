"""One process of a run: what it is, and the place that starts, watches and ends it."""
