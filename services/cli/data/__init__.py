"""`penstock data`: shows a recipe's data."""
