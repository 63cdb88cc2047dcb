"""Names that settings and records share.

Every command reads settings. With the names here, it need not import numpy, which records import.
"""

TRAIN = "train"
"""The purpose of prompts that are trained on; every other purpose is the name of an evaluation."""
SINGLE_TURN = "single_turn"
"""The environment of prompts that are answered once, and judged by the reward service."""
