"""What each service gets of a recipe, and folders in place of models on the Hub."""
