"""How far another host's clock is from this one's. Pure."""


def ahead_s(*, asked_at: float, heard_at: float, said_at: float, answered_at: float) -> float:
    """Return by how many seconds, at the least, the other clock is ahead; negative: behind.

    Question and answer may be on their way for seconds, which say nothing of the clocks. What is certain is that each
    left one host before it came to the other.

    Args:
        asked_at: This host's clock when the question left.
        heard_at: The other's after it had come.
        said_at: The other's before the answer left.
        answered_at: This host's when it had come.
    """
    return max(said_at - answered_at, 0.0) + min(heard_at - asked_at, 0.0)
