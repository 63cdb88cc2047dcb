"""`penstock eval`: plays a recipe's evaluation sets with a model, a checkpoint or an API."""
