"""`penstock eval`: the evaluation sets of a recipe, played by a model, a checkpoint or an API."""
