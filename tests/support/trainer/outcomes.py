"""Outcomes of an evaluation, in the order in which they come."""

from services.trainer.evaluation.evaluation import OnPlayed
from services.trainer.evaluation.outcome import PlayedPrompt


def appending_to(outcomes: list[PlayedPrompt]) -> OnPlayed:
    """What an evaluation tells each outcome, which is kept in `outcomes`."""

    async def append(outcome: PlayedPrompt) -> None:
        outcomes.append(outcome)

    return append
