"""`penstock env`: plays an environment by hand, or from scripted lines."""
