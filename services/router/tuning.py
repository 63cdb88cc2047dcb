"""Constants of the router that no deployment needs to set. Tests shorten them.

Each comes with the reason for its value.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LimitTuning:
    """How the limit on a replica's calls follows its lease: additive increase, multiplicative decrease."""

    factor: float = 1.125
    """The limit never exceeds the replica's max_running times this. Above 1, calls wait in the replica's own queue, so
    that none of its slots idles between two calls. They stay there, behind samples that may be long, while slots of
    other replicas become free. With long-tailed lengths 1.5 costs 1 to 11% of the optimizer steps, and this value at
    most 2% (bench/async_loop)."""
    kv_high: float = 0.95
    """Above this share of its KV cache a replica begins to retract requests, so its limit shrinks."""
    queue_high: float = 0.5
    """A queue longer than this share of max_running exceeds what `factor` explains, so the limit shrinks."""
    increase: float = 0.0625
    """Share of max_running, at least 1, by which the limit grows in each lease interval: sixteen of them double it."""
    decrease: float = 0.7
    """The limit's multiplier when it shrinks; TCP CUBIC's. It never falls below 1."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BreakerTuning:
    """When a failing replica gets no calls, and for how long."""

    failures: int = 3
    """Failures in a row that open the breaker; one is enough if there is no connection."""
    open_s: float = 1.0
    """Seconds without calls for the replica. After that one call probes it; each failed probe doubles the pause."""
    max_open_s: float = 30.0
    """Maximum seconds between two probes: an engine restarts in less."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenAITuning:
    """Bounds and times of the OpenAI-compatible frontend."""

    timeout_s: float = 600.0
    """Deadline of one answer in seconds: OpenAI's own clients give up then."""
    max_body_bytes: int = 64 * 2**20
    """Larger bodies are refused. A conversation with two of the largest images fits."""
    max_image_bytes: int = 20 * 2**20
    """OpenAI's own bound."""
    max_images: int = 32
    """Images in one conversation: more than the contexts of the served models hold at usual sizes."""
    max_choices: int = 16
    """Maximum choices of one request, over all its prompts: each takes a slot, and none may fill an engine alone."""
    recordings_max_age_s: float = 7 * 86400.0
    """Seconds after which recorded calls that were not fetched are removed: a week."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """All constants of the router."""

    limit: LimitTuning = LimitTuning()
    breaker: BreakerTuning = BreakerTuning()
    openai: OpenAITuning = OpenAITuning()
    max_waiting_bytes: int = 512 * 2**20
    """Maximum bytes of requests in the wait queue, with images: what a router can spare beside its calls in flight."""
    max_call_s: float = 3600.0
    """Maximum deadline in seconds, also for calls without one, so that no call stays forever; worker.episode_timeout_s
    tells users."""
    time_to_answer_s: float = 0.2
    """Seconds before the caller's deadline at which waiting ends, so that the caller still receives the reason."""
    max_load_ratio: float = 1.25
    """prefix and consistent_hash skip a replica whose load exceeds the others' by more than this factor: the bound that
    Mirrokni, Thorup and Zadimoghaddam recommend."""
    max_attempts: int = 3
    """After this many replicas in a row failed a call without delivering a token, it is given up with ABORTED, because
    the call itself may break them. Two may fail by chance, when a machine with several engines goes away; a third would
    be one more replica lost to a bad row."""
    chunk_tokens: int = 64
    """Unary calls run as streams with chunks of this many tokens: the maximum loss when a replica dies."""
    route_ttl_s: float = 600.0
    """Maximum seconds that a dead client keeps a slot it took by Route; workers' turns end sooner."""
    max_sessions: int = 100_000
    """affinity remembers the replica of this many sessions, about 20 MB; the least recently used is forgotten."""
    max_prefix_blocks: int = 200_000
    """prefix remembers the replica of this many blocks of 64 tokens, about 20 MB; the least recently used is
    forgotten."""


DEFAULT = Tuning()
