"""Models and states in files: what checkpoints hold, and what others load."""
