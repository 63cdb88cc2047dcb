"""A replica as balancing sees it: an immutable view of its lease and of the router's counters at one moment."""

import dataclasses
import enum
import math
import sys

from penstock.v1 import common_pb2

PD_ROLES = (common_pb2.REPLICA_ROLE_PREFILL, common_pb2.REPLICA_ROLE_DECODE)
"""Roles that answer in pairs only."""

UNBOUNDED = sys.maxsize
"""The `max_tokens` of a replica whose lease has none."""


class UnroutableReason(enum.Enum):
    """Why a replica cannot take a call; the value completes "2 replicas are ..."."""

    STARTING = "starting"
    BROKEN = "broken by a failed push"
    DRAINING = "draining"
    UPDATING = "taking a push"
    ROLE = "without a role that can answer"
    NO_PARTNER = "without a partner: a prefill and a decode replica answer together"
    OTHER_BACKEND = "without a partner that has the same transfer_backend"
    OTHER_TENSOR_PARALLEL = (
        "without a partner that has the same tensor_parallel: SGLang cannot move a KV cache between unequal ones"
    )
    OTHER_VERSION = "without a partner that has the same policy version"
    PAIRED = "in PD pairs, which report nothing on a prompt's tokens"
    SMALL = "too small for it"
    STALE = "below policy version"
    OTHER_THAN_EXACT = "not at exactly policy version"
    HELD_OUT = "held out of pushes for an evaluation"
    NOT_HELD_OUT = "not held out of pushes for its evaluation"
    TRIED = "already tried"
    FAILING = "failing or unreachable"
    PARTNERS_UNFIT = "without a partner that can take calls"
    PARTNERS_FULL = "without a partner that has a free slot"
    FULL = "at the limit of calls"
    REJECTING = "rejecting calls"


TRANSIENT = frozenset((UnroutableReason.UPDATING, UnroutableReason.PARTNERS_FULL, UnroutableReason.FULL))
"""Reasons that will certainly pass: calls wait for them until their deadline."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """One replica that holds its lease.

    Balancers choose among replicas that read prompts (unified and prefill), because the prefix cache of a session is
    there. A prefill replica decodes with its least loaded partner.
    """

    replica_id: str
    role: "common_pb2.ReplicaRole.ValueType" = common_pb2.REPLICA_ROLE_UNIFIED
    policy_version: int = 0
    max_tokens: int = UNBOUNDED
    """Maximum tokens of prompt and response together."""
    max_running: int = 1
    """Calls that it runs at once, at least 1; its load is relative to this."""
    is_settled: bool = True
    """Whether it is READY and takes no push."""
    is_held_out: bool = False
    """Whether it is held out of pushes and answers only the calls of an evaluation."""
    unroutable: UnroutableReason | None = None
    """Why the leases let it take no call at all: its state, its role, or the lack of a partner."""
    partner_ids: tuple[str, ...] | None = None
    """The replicas with which it forms PD pairs; None: it needs none."""
    num_in_flight: int = 0
    """Slots that this router has given out."""
    num_elsewhere: int = 0
    """Calls that its lease reports beyond this router's own: those of other routers and clients."""
    max_in_flight: int = sys.maxsize
    """Maximum calls that this router gives it at once."""
    rejecting_until: float = -math.inf
    """Monotonic time until which it gets no calls because it rejected one."""
    failing_until: float = -math.inf
    """Monotonic time until which its circuit breaker allows no call."""

    @property
    def num_calls(self) -> int:
        """Its calls from all routers and clients."""
        return self.num_in_flight + self.num_elsewhere

    @property
    def has_room(self) -> bool:
        """Whether this router gives it another call."""
        return self.num_in_flight < self.max_in_flight

    @property
    def load(self) -> float:
        """Calls per slot, without partners."""
        return self.num_calls / self.max_running

    @property
    def next_load(self) -> float:
        """Its load with one more call."""
        return (self.num_calls + 1) / self.max_running

    @property
    def is_open(self) -> bool:
        """Whether it takes calls while it is not full, and no push is in progress."""
        return self.unroutable is None and self.is_settled

    @property
    def reads_prompts(self) -> bool:
        """Whether balancers choose it, alone or for a pair."""
        return self.partner_ids is None or self.role == common_pb2.REPLICA_ROLE_PREFILL
