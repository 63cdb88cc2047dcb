"""Data sets: reads rows of several layouts into the examples that prompts are made from."""
