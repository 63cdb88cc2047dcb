"""Models and states in files: the contents of checkpoints, and models that others load."""
