"""How long answers can get under a recipe, and length penalties that none of them can reach. Pure."""

import math

from penstock.config import SamplingConfig
from penstock.names import SINGLE_TURN
from services.trainer.algorithm.axes import LengthPenaltyConfig
from services.trainer.data.config import DataConfig, SourceConfig


def most_own_tokens(data: DataConfig, sampling: SamplingConfig, *, context_length: int) -> float:
    """Return a bound on the policy's own tokens of a sample, over all its turns; infinite if nothing known bounds them.

    Args:
        data: The prompts' sources.
        sampling: How many tokens a turn may have. Rows may lower that, but not raise it.
        context_length: `rollout.context_length`; 0: what the model allows, which is unknown here.
    """
    most = max(_of_source(source, sampling.max_new_tokens) for source in data.by_name.values())
    return min(most, context_length or math.inf)


def _of_source(source: SourceConfig, max_new_tokens: int) -> float:
    max_turns, max_tokens = source.limits.max_turns or math.inf, source.limits.max_tokens or math.inf
    if source.limits_column:  # a row's own limits replace the source's
        max_turns = max_tokens = math.inf
    if source.environment == SINGLE_TURN and not source.environment_column:
        max_turns = 1
    return min(max_turns * max_new_tokens, max_tokens)


def penalty_contradiction(penalty: LengthPenaltyConfig, most: float, *, max_new_tokens: int) -> str:
    """Return why a length penalty can never apply; empty if it can.

    Args:
        penalty: The penalty.
        most: From `most_own_tokens`.
        max_new_tokens: `sampling.max_new_tokens`, for the text.
    """
    start = penalty.max_tokens - penalty.buffer_tokens
    if penalty.kind != "soft_overlong" or most > start:
        return ""
    return (
        f"algorithm.advantage.length_penalty.max_tokens = {penalty.max_tokens} with buffer_tokens = "
        f"{penalty.buffer_tokens} punishes answers of more than {start} tokens, but sampling.max_new_tokens = "
        f"{max_new_tokens} and the limits of episodes end all at {most:g} or before: the penalty can never apply; set "
        f"max_tokens = {most:g} and a buffer_tokens below it, or raise sampling.max_new_tokens"
    )


def penalty_doubt(penalty: LengthPenaltyConfig, most: float) -> str:
    """Return a warning if the longest answer's penalty is less than the full one; empty if not."""
    if penalty.kind != "soft_overlong" or most >= penalty.max_tokens:
        return ""
    share = (most - (penalty.max_tokens - penalty.buffer_tokens)) / penalty.buffer_tokens
    return (
        f"answers end at {most:g} tokens, before algorithm.advantage.length_penalty.max_tokens = {penalty.max_tokens}: "
        f"the longest lose {share:.0%} of overlong_factor at most"
    )
