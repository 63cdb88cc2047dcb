"""The profiles of value equality as the service has them, without the service."""

from fractions import Fraction

from services.reward.item import Item
from services.reward.profiles.profile import Decision, Scoring
from services.reward.profiles.value import ValueProfile
from services.reward.verdict import Finding

PROFILES = {
    name: ValueProfile(
        name=name,
        description="",
        scoring=Scoring(),
        tolerance=Fraction(tolerance),
        decimal_figures=figures,
    )
    for name, tolerance, figures in (("math", "0", 4), ("geo3k", "0.05", 4), ("strict", "0", 0))
}


def verify(golds: list[str], response: str, profile: str = "math") -> Decision:
    """What the profile decides of a whole response."""
    return PROFILES[profile].decide(Item(golds=golds, response=response, profile=profile))


def is_right(gold: str, answer: str, profile: str = "math") -> bool:
    """Whether the profile decides by itself that a boxed answer is right; it must decide."""
    finding = verify([gold], rf"So \boxed{{{answer}}}.", profile)
    assert isinstance(finding, Finding), "left to a worker"
    return finding.credit == 1
