"""How far two computations of the same log-probabilities may differ; tests and benchmarks share it."""

from typing import Final

MAX_DLOGP: Final = 3e-5
"""Nats between engine and trainer, for a token of the current version, in float32 with the tiny models: rounding alone
(docs/benchmarks.md, "Whose rounding it is")."""
