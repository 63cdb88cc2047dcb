"""What a session's limits leave for the next answer. Pure.

They bound each conversation as they bound an environment's episode, the prompt and its images included.
"""

from collections.abc import Mapping

from penstock.model.families.qwen_vl import ImageGrid
from penstock.model.images import read_sizes
from penstock.records import Limits
from services.router.frontends.openai.errors import SessionLimitError
from services.router.frontends.openai.sessions.history import NextPrompt


def room_for_answer(
    prompt: NextPrompt, limits: Limits, images: Mapping[str, bytes], grid: ImageGrid | None, *, num_begun: int = 0
) -> int | None:
    """Return the most tokens that the answer to `prompt` may have; None: no limit.

    Args:
        prompt: The conversation.
        limits: The session's limits.
        images: Files of the prompt's images by content hash; they are read only for a limit that counts them.
        grid: How the model cuts images into tokens; None for a model without images.
        num_begun: Tokens with which the router begins the answer.

    Raises:
        SessionLimitError: the conversation is over a limit, or leaves no room for a token.
        InvalidRequestError: an image cannot be read.
    """
    _require(len(prompt.images), "images", limits.max_images, "max_images")
    if limits.max_pixels is not None:
        sizes = read_sizes([images[each] for each in prompt.images])
        _require(sum(width * height for width, height in sizes), "pixels", limits.max_pixels, "max_pixels")
    if limits.max_tokens is None and limits.max_observation_tokens is None:
        return None
    num_new = 0 if grid is None else grid.num_added_tokens(read_sizes([images[each] for each in prompt.added_images]))
    num_observed = prompt.num_observed + (len(prompt.added_ids) + num_new if prompt.continues else 0)
    _require(num_observed, "tokens that answer the policy", limits.max_observation_tokens, "max_observation_tokens")
    if limits.max_tokens is None:
        return None
    num_tokens = prompt.num_tokens + num_new + num_begun
    _require(num_tokens, "tokens", limits.max_tokens, "max_tokens", num_reserved=1)
    return limits.max_tokens - num_tokens


def _require(number: int, unit: str, most: int | None, name: str, *, num_reserved: int = 0) -> None:
    if most is not None and number + num_reserved > most:
        raise SessionLimitError(
            f"the conversation has {number} {unit}, and the session's {name} is {most}; shorten it, or raise the limit"
        )
