"""Scores answers by length: a model that solves nothing still gets rewards that differ.

recipes/cut-to-size.toml names it, so that a group of a random model has something to learn from.
"""

_HALF_CREDIT_CHARS = 100


def verify(golds: list[str], response: str, prompt: str) -> float:
    """Return a credit that grows with the response's length: 0 for an empty one, 1/2 at 100 characters, never 1."""
    return len(response) / (len(response) + _HALF_CREDIT_CHARS)
