"""Settings of the reward service."""

import dataclasses
import re
from decimal import Decimal
from typing import Annotated, Any, Final, Literal

import pydantic

from penstock.config import Config, MetricsConfig, NetworkConfig, RunConfig
from penstock.config.paths import expand_home

MAX_TRIES: Final = 3
"""Tries of the profile `remote` if the service fails: two more bridge a restart of seconds."""
MAX_DEADLINE_S: Final = 50.0
"""Maximum seconds of an item: less than the minute that workers first wait for a group's verdicts, enough for three
tries of a remote service, and too short for hostile items to hold the workers for long."""
_WITH_USER = re.compile(r"(?:[^/?#]*//)?[^/?#]*@")


class ProfileConfig(Config):
    """One profile: where it finds answers, and its scale. Unset fields follow the framework that the profile is
    compatible with."""

    answers_in: Literal["box", "marks", "words"] | None = None
    r"""Profiles math, geo3k and mcq: in which forms an answer counts. box: \boxed{} only, for recipes that demand it.
    marks: also <answer> and `Answer:` at the start of a line; by default of geo3k. words: also a sentence such as `the
    final answer is 5`; by default of math and mcq. A later answer that contradicts an earlier one counts."""
    reward_max: float | None = None
    """Score of a right answer; by default 1."""
    reward_min: float | None = None
    """Score of a wrong answer, and of an answer that could not be verified; by default 0, for dapo -1."""
    format_weight: float | None = pydantic.Field(default=None, ge=0, le=1)
    """Share of the score that the format earns, whatever the answer; by default 0, for verl_geo3k 0.1."""
    format_pattern: str | None = None
    r"""Python regular expression that the whole response must match, `.` including line ends; for verl_geo3k by default
    `<think>.*</think>.*\\boxed\{.*\}.*`. End-of-text tokens at the end are seen by compatible profiles only. Literals
    and `.*` are fast; anything else is matched in a worker process. It counts by `format_weight`, and
    is refused where that is left at 0."""

    @pydantic.field_validator("format_pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                re.compile(pattern, re.DOTALL)
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"is not a regular expression: {error}") from None
        return pattern


class RemoteConfig(Config):
    """The service that the profile `remote` asks."""

    url: str = pydantic.Field(default="", pattern="^(https?://.+)?$")
    """Where to POST {"prompt", "response", "label"}, as slime does; empty: there is no profile `remote`. It has no user
    and password: the service gets `PENSTOCK_REMOTE_TOKEN`."""
    timeout_s: float = pydantic.Field(default=10.0, gt=0)
    """Seconds for one try, of three. An item without a deadline has the time of all three, at most 50 s."""
    max_concurrency: int = pydantic.Field(default=64, ge=1, le=4096)
    """Requests at once; further items wait."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _holds_no_secret(cls, section: Any) -> Any:
        # Checks the whole section, and before anything else, so that no message shows the URL.
        url = section.get("url") if isinstance(section, dict) else None
        if isinstance(url, str) and _WITH_USER.match(url):
            raise ValueError(
                "url holds a user or a password, which would be written down with the recipe; leave out what is before "
                "the @, and set PENSTOCK_REMOTE_TOKEN"
            )
        return section

    @pydantic.field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        if url:
            pydantic.TypeAdapter(pydantic.AnyHttpUrl).validate_python(url)
        return url


class RewardConfig(Config):
    """The reward service's ports, verification and limits."""

    port: int = pydantic.Field(default=0, ge=0, le=65535)
    """Port to listen on for gRPC; 0 takes any free one."""
    http_port: int = pydantic.Field(default=0, ge=0, le=65535)
    """Port to listen on for HTTP; 0 takes any free one."""
    http_profile: str = "math"
    """Profile of requests from slime and OpenRLHF whose URL has no ?profile=."""
    http_max_body_mb: int = pydantic.Field(default=64, ge=1, le=1024)
    """HTTP requests above this size, in MiB, are refused. All requests together may hold twice as much, and 4 to 10
    times that in memory once their JSON is read; further ones are told to come back later."""
    workers: int = pydantic.Field(default=2, ge=1, le=256)
    """Worker processes for symbolic comparison; each has one item at a time."""
    deadline_s: float = pydantic.Field(default=1.0, gt=0, le=MAX_DEADLINE_S)
    """Wall-clock limit of one item without its own, in seconds from when a worker takes it; then the worker is killed.
    At most 50 s, as for items that ask for their own, because a rollout worker's first call for a group's verdicts
    waits a minute. What takes longer belongs in an environment or agent of your own."""
    memory_limit_mb: int = pydantic.Field(default=192, ge=128)
    """Memory that a worker process may take, in MiB of address space, beyond what it starts with: its libraries and the
    custom verifiers. All workers together may take 192 MiB, or as much as one if that is more."""
    sandbox: Literal["auto", "require", "off"] = "auto"
    """Confine worker processes (no network, no new process, no writing) where the kernel can; or refuse to start."""
    recycle_after: int = pydantic.Field(default=5000, ge=1)
    """A worker process is replaced by a fresh one after this many items; 1 isolates items from each other if a verifier
    runs code out of responses."""
    geo3k_tolerance: Decimal = pydantic.Field(default=Decimal("0.05"), ge=0)
    """Profile geo3k: largest |answer - gold| of a right answer, for gold answers that are rounded labels. A rounded
    label is written with a decimal point, or is an integer of at least 100 in absolute value. 0 is strict."""
    profiles: dict[str, ProfileConfig] = pydantic.Field(default_factory=dict)
    """Scales of the profiles, by profile: [reward.profiles.math] reward_min = -1."""
    verifiers: dict[str, Annotated[str, pydantic.AfterValidator(expand_home)]] = pydantic.Field(default_factory=dict)
    """Custom verifiers, each a profile, by name: "path/to/file.py:function" or "package.module:function"."""
    remote: RemoteConfig = RemoteConfig()
    """The service that the profile `remote` asks."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings:
    """Everything that a reward service receives."""

    reward: RewardConfig
    run: RunConfig
    network: NetworkConfig
    metrics: MetricsConfig = dataclasses.field(default_factory=MetricsConfig)
