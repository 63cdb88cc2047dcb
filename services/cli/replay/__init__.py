"""`penstock replay`: recomputes an optimizer step."""
