"""What each service gets of a recipe, the inputs of a whole run, and folders in place of models on the Hub."""
