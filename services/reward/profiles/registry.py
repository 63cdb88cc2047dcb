"""All profiles by name."""

from fractions import Fraction

from penstock.errors import InvalidRequestError
from services.reward.config import ProfileConfig, RewardConfig
from services.reward.profiles.profile import Profile, Scoring
from services.reward.profiles.value import ValueProfile


def make_profiles(config: RewardConfig) -> dict[str, Profile]:
    """All profiles by name, with the settings' limits and scales."""
    profiles: tuple[Profile, ...] = (
        ValueProfile(
            name="math",
            description="The last box, compared by value: 1 if equal to a gold answer, else 0.",
            scoring=_scoring(config.profiles.get("math", ProfileConfig())),
            tolerance=Fraction(0),
            max_response_chars=config.max_response_chars,
            max_answer_chars=config.max_answer_chars,
        ),
        ValueProfile(
            name="geo3k",
            description="As math; where the gold answer is written with a decimal point (a rounded label, such as 8.5 "
            f"or 20.0), an answer within {config.geo3k_tolerance} of it is right.",
            scoring=_scoring(config.profiles.get("geo3k", ProfileConfig())),
            tolerance=Fraction(config.geo3k_tolerance),
            max_response_chars=config.max_response_chars,
            max_answer_chars=config.max_answer_chars,
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


def _scoring(config: ProfileConfig) -> Scoring:
    return Scoring(reward_max=config.reward_max, reward_min=config.reward_min)
