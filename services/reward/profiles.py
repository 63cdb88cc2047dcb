"""The profiles: named ways to judge, of which a caller picks one per item."""

from dataclasses import dataclass
from fractions import Fraction

from penstock.errors import InvalidRequestError
from services.reward.config import RewardConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How to judge."""

    name: str
    description: str
    tolerance: Fraction
    """Largest |answer - gold| that is right for a gold answer written with a decimal point; others are exact."""
    max_response_chars: int
    max_answer_chars: int
    reward_max: float = 1.0
    """Score of a right answer."""
    reward_min: float = 0.0
    """Score of every other."""


def make_profiles(config: RewardConfig) -> dict[str, Profile]:
    """All profiles by name, with the settings' limits."""
    tolerance = Fraction(config.geo3k_tolerance)

    def profile(name: str, description: str, tolerance: Fraction) -> Profile:
        return Profile(
            name=name,
            description=description,
            tolerance=tolerance,
            max_response_chars=config.max_response_chars,
            max_answer_chars=config.max_answer_chars,
        )

    profiles = (
        profile("math", "The last box, compared by value: 1 if equal to a gold answer, else 0.", Fraction(0)),
        profile(
            "geo3k",
            "As math; where the gold answer is written with a decimal point (a rounded label, such as 8.5 or 20.0), "
            f"an answer within {config.geo3k_tolerance} of it is right.",
            tolerance,
        ),
    )
    return {profile.name: profile for profile in profiles}


def find_profile(profiles: dict[str, Profile], name: str) -> Profile:
    """Return the profile of that name.

    Raises:
        InvalidRequestError: there is none.
    """
    if name not in profiles:
        raise InvalidRequestError(f"profile {name[:64]!r} is unknown; known: {', '.join(sorted(profiles))}")
    return profiles[name]
