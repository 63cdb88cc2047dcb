r"""All profiles by name: their construction, description and default scale."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from penstock.errors import ConfigError, InvalidRequestError
from services.reward.config import MAX_TRIES, ProfileConfig, RewardConfig
from services.reward.exact.extraction import Forms
from services.reward.profiles.custom import CustomProfile, find_verifiers
from services.reward.profiles.dapo import DapoProfile
from services.reward.profiles.f1 import F1Profile
from services.reward.profiles.format import Format
from services.reward.profiles.gpqa import GpqaProfile
from services.reward.profiles.math_verify import MathVerifyProfile
from services.reward.profiles.mcq import McqProfile
from services.reward.profiles.prm800k import DEEPSCALER, SLIME_MATH, VERL_GEO3K, Prm800kProfile
from services.reward.profiles.profile import MAX_RESPONSE_CHARS, Profile, Scoring
from services.reward.profiles.remote import RemoteProfile
from services.reward.profiles.value import ValueProfile

_VERL_GEO3K_FORMAT = r"<think>.*</think>.*\\boxed\{.*\}.*"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A built-in profile, without its settings."""

    make: Callable[..., Profile]
    description: str
    reward_min: float = 0.0
    format_weight: float = 0.0
    format_pattern: str | None = None
    answers_in: Forms | None = None
    """The forms in which an answer counts; None if the profile has no choice of them."""
    drops_end_of_text: bool = False
    """Whether a format pattern sees the response without end-of-text tokens; not where the profile imitates a peer."""


def make_profiles(config: RewardConfig, verifiers: Mapping[str, str] | None = None) -> dict[str, Profile]:
    """Return all profiles by name, with the settings' limits and scales.

    Args:
        config: The settings.
        verifiers: The location of each custom verifier, by name.

    Raises:
        ConfigError: a custom verifier has a profile's name, or the settings of a profile name none or contradict each
            other.
    """
    kinds = _kinds(config)
    for name, spec in (verifiers or {}).items():
        if name in kinds or name == "remote":
            raise ConfigError(f"custom verifier {name} = {spec!r} has the name of a built-in profile; give it another")
        kinds[name] = _Kind(
            make=CustomProfile,
            description=f"Custom verifier {spec}, in a worker process.",
            drops_end_of_text=True,
        )
    for name in config.profiles:
        if name not in kinds:
            hint = "; set reward.remote.url for the profile remote" if name == "remote" else ""
            known = ", ".join(sorted(kinds))
            raise ConfigError(f"section [reward.profiles.{name}]: unknown profile{hint}; known: {known}")
    return {
        name: kind.make(
            name=name,
            description=kind.description,
            scoring=_scoring(name, kind, config),
            **_forms(name, kind, config),
        )
        for name, kind in kinds.items()
    }


def profile_names(config: RewardConfig) -> list[str]:
    """Return the names of the profiles that a service with these settings has; installed verifiers are among them."""
    return [*_kinds(config), *find_verifiers(config.verifiers)]


def find_profile(profiles: dict[str, Profile], name: str) -> Profile:
    """Return the profile of that name.

    Raises:
        InvalidRequestError: there is none.
    """
    if name not in profiles:
        raise InvalidRequestError(f"profile {name[:64]!r} is unknown; known: {', '.join(sorted(profiles))}")
    return profiles[name]


def _kinds(config: RewardConfig) -> dict[str, _Kind]:
    kinds = {
        "math": _Kind(
            make=partial(ValueProfile, tolerance=Fraction(0)),
            description="The final answer, in a box or said in words, compared by value: 1 if equal to a gold answer, "
            "else 0.",
            answers_in=Forms.WORDS,
            drops_end_of_text=True,
        ),
        "geo3k": _Kind(
            make=partial(
                ValueProfile,
                tolerance=Fraction(config.geo3k_tolerance),
            ),
            description="The last box, <answer> or `Answer:`, compared as by math; where the gold answer is a rounded "
            "label (written with a decimal point, or an integer of at least 100), an answer within "
            f"{config.geo3k_tolerance} of it is right.",
            answers_in=Forms.MARKS,
            drops_end_of_text=True,
        ),
        "mcq": _Kind(
            make=McqProfile,
            description="Multiple choice: the letter that a response chooses, in a box or in words; where a gold "
            "answer is the choice's text, that too.",
            answers_in=Forms.WORDS,
            drops_end_of_text=True,
        ),
        "slime_math": _Kind(
            make=partial(Prm800kProfile, reading=SLIME_MATH),
            description="slime's rm_type math: the last \\boxed{}, anywhere, by prm800k's spelling rules and sympy.",
        ),
        "deepscaler": _Kind(
            make=partial(Prm800kProfile, reading=DEEPSCALER),
            description="slime's rm_type deepscaler: as slime_math, but only after </think> or ###Response.",
        ),
        "dapo": _Kind(
            make=DapoProfile,
            description="slime's rm_type dapo: the last 'Answer:' of the last 300 characters, spelt as the gold "
            "integer is; 1 or -1.",
            reward_min=-1.0,
        ),
        "verl_geo3k": _Kind(
            make=partial(Prm800kProfile, reading=VERL_GEO3K),
            description="verl's geo3k: 0.9 for the last \\boxed{} by MathRuler's grader, 0.1 for <think>, </think> and "
            "a box in this order.",
            format_weight=0.1,
            format_pattern=_VERL_GEO3K_FORMAT,
        ),
        "math_verify": _Kind(
            make=MathVerifyProfile,
            description="math-verify 0.9.0 with its defaults: its own extraction from gold and response, and verify.",
        ),
        "f1": _Kind(
            make=F1Profile,
            description="slime's rm_type f1: F1 of the words of the whole response and the gold answer, as in SQuAD.",
        ),
        "gpqa": _Kind(
            make=GpqaProfile,
            description="slime's rm_type gpqa: the letter from A to J that the response chooses, or the choice's text.",
        ),
    }
    if config.remote.url:
        kinds["remote"] = _Kind(
            make=partial(RemoteProfile, default_deadline_s=MAX_TRIES * config.remote.timeout_s),
            description="The number that another service answers, asked in the format of slime's remote_rm.",
        )
    return kinds


def _forms(name: str, kind: _Kind, config: RewardConfig) -> dict[str, Forms]:
    """Return the argument for the forms in which an answer counts, for profiles that have one.

    Raises:
        ConfigError: the settings choose forms for another profile.
    """
    given = config.profiles.get(name, ProfileConfig()).answers_in
    if kind.answers_in is None:
        if given is not None:
            raise ConfigError(
                f"reward.profiles.{name}.answers_in = {given!r}: this profile finds answers in its own way; remove it, "
                "or use profile math, geo3k or mcq"
            )
        return {}
    return {"answers_in": kind.answers_in if given is None else Forms(given)}


def _scoring(name: str, kind: _Kind, config: RewardConfig) -> Scoring:
    """Return the profile's scale with the settings.

    Raises:
        ConfigError: the settings have a format without weight, a weight without format, or one score for everything.
    """
    given = config.profiles.get(name, ProfileConfig())
    weight = kind.format_weight if given.format_weight is None else given.format_weight
    pattern = kind.format_pattern if given.format_pattern is None else given.format_pattern
    if weight and pattern is None:
        raise ConfigError(
            f"reward.profiles.{name}.format_weight = {weight}: the profile has no format of its own; "
            "give format_pattern too"
        )
    if given.format_pattern is not None and given.format_weight is None and weight == 0:
        raise ConfigError(
            f"reward.profiles.{name}.format_pattern = {given.format_pattern!r} has no effect while format_weight is 0; "
            "give format_weight too"
        )
    reward_max = 1.0 if given.reward_max is None else given.reward_max
    reward_min = kind.reward_min if given.reward_min is None else given.reward_min
    if reward_max == reward_min:
        raise ConfigError(
            f"reward.profiles.{name}.reward_max = {reward_max:g} is its reward_min too, so all responses score "
            "the same; give another reward_max or reward_min"
        )
    form = None
    if pattern is not None:
        form = Format(pattern, max_chars=MAX_RESPONSE_CHARS, drops_end_of_text=kind.drops_end_of_text)
    return Scoring(
        reward_max=reward_max,
        reward_min=reward_min,
        format_weight=weight,
        format=form,
    )
