"""`penstock replay`: an optimizer step computed again."""
