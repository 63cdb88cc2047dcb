"""`penstock view` in a real Chromium."""
