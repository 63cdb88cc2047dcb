"""Data sets: rows of several layouts, read into the examples that prompts are made of."""
