"""Shows a run on a terminal: where it stands, while it trains and with `penstock status`."""
