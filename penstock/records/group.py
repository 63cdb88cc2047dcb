"""Groups: all samples of one prompt, as a worker publishes them."""

import msgspec

from penstock.names import TRAIN
from penstock.records.prompt import GroupId
from penstock.records.record import Envelope
from penstock.records.sample import Sample


class Group(Envelope, frozen=True, kw_only=True):
    """All samples of one prompt, or the reason why there are none. The prompt itself stays with the trainer."""

    id: GroupId
    """The prompt's id."""
    purpose: str = TRAIN
    """The prompt's purpose."""
    environment: str = ""
    """The prompt's environment."""
    num_samples: int
    """The number of samples that the prompt asked for."""
    samples: tuple[Sample, ...]
    worker_id: str
    error: str = ""
    """Why the group could not be played; empty if it was."""
    is_lost: bool = False
    """Whether an image of its prompt is no longer stored, so that it was not played. The trainer admits it again."""
    num_deliveries: int = 1
    """Deliveries of its prompt to workers: above 1, earlier samples were drawn and lost."""
    temperature: float | None = None
    """At which its samples were drawn; None: there are none, or a worker of an earlier release played them."""

    def __post_init__(self) -> None:
        if self.error == "" and len(self.samples) != self.num_samples:
            raise ValueError(f"a group of {self.num_samples} samples holds {len(self.samples)}")
        if self.error != "" and self.samples:
            raise ValueError("a failed group holds samples")
        if self.is_lost and self.error == "":
            raise ValueError("a lost group gives no reason")

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that produced one of its tokens."""
        return min(sample.oldest_version for sample in self.samples)

    @property
    def newest_version(self) -> int:
        """The newest policy version that produced one of its tokens."""
        return max(sample.newest_version for sample in self.samples)

    @property
    def num_own_tokens(self) -> int:
        """Tokens that the policy itself produced, over all samples."""
        return sum(sample.num_own_tokens for sample in self.samples)

    @property
    def has_routed_experts(self) -> bool:
        """Whether it is known of any token which experts computed it."""
        return any(sequence.routed_experts is not None for sample in self.samples for sequence in sample.sequences)

    def without_routed_experts(self) -> "Group":
        """Return a copy without the experts that computed its tokens, which are most of its bytes."""
        replace = msgspec.structs.replace
        samples = (
            replace(sample, sequences=tuple(replace(sequence, routed_experts=None) for sequence in sample.sequences))
            for sample in self.samples
        )
        return replace(self, samples=tuple(samples))

    @property
    def images(self) -> frozenset[str]:
        """Content hashes of all images of all its samples; stored under `id.scope`."""
        return frozenset[str]().union(*(sample.images for sample in self.samples))
