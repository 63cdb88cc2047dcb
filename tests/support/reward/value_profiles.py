"""The profiles of value equality as the service has them, without the service."""

from fractions import Fraction

from services.reward.exact.extraction import Forms
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
        answers_in=forms,
    )
    for name, tolerance, figures, forms in (
        ("math", "0", 4, Forms.WORDS),
        ("geo3k", "0.05", 4, Forms.MARKS),
        ("strict", "0", 0, Forms.BOX),
    )
}


def verify(golds: list[str], response: str, profile: str = "math") -> Decision:
    """What the profile decides of a whole response."""
    return PROFILES[profile].decide(Item(golds=golds, response=response, profile=profile))


def is_right(gold: str, answer: str, profile: str = "math") -> bool:
    """Whether the profile decides by itself that a boxed answer is right; it must decide."""
    finding = verify([gold], rf"So \boxed{{{answer}}}.", profile)
    assert isinstance(finding, Finding), "left to a worker"
    return finding.credit == 1
