"""Lengths of an optimizer batch of Geometry3K, for tests of packing.

Prompts: image and text tokens of every ninth row of hiyouga/geometry3k's first 300, at Qwen3-VL's 32 x 32 pixels a
token. Responses: eight of 100 to 1500 tokens to each, drawn from a long-tailed law.
"""

import numpy as np

PROMPTS = (
    232, 90, 122, 106, 263, 191, 191, 279, 64, 110, 263, 167, 94, 114, 125, 235,
    177, 107, 125, 129, 120, 138, 135, 214, 110, 206, 230, 74, 152, 198, 121, 356,
)  # fmt: skip

_responses = np.random.default_rng(0).lognormal(np.log(450), 0.6, (len(PROMPTS), 8)).clip(100, 1500).astype(int)

GEO3K_GROUPS: list[tuple[int, list[int]]] = list(zip(PROMPTS, _responses.tolist(), strict=True))
"""Of each group, the length of its prompt and of each response."""
