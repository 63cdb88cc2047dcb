"""`penstock data`: what a recipe's data holds."""
