"""Groups: all samples of one prompt, as a worker publishes them."""

from penstock.records.prompt import Prompt
from penstock.records.record import Record
from penstock.records.sample import Sample

NUM_DELIVERIES_HEADER = "Penstock-Num-Deliveries"
"""Header of a group's message: how often its prompt was delivered to workers. Above 1, its samples were drawn again."""


class Group(Record, frozen=True):
    """All samples of one prompt, or the reason why there are none."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    worker_id: str
    error: str = ""
    """Why the group could not be played; empty when it was."""

    def __post_init__(self) -> None:
        if self.error == "" and len(self.samples) != self.prompt.num_samples:
            raise ValueError(f"a group of {self.prompt.num_samples} samples holds {len(self.samples)}")
        if self.error != "" and self.samples:
            raise ValueError("a failed group holds samples")

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that produced one of its tokens."""
        return min(sample.oldest_version for sample in self.samples)

    @property
    def newest_version(self) -> int:
        """The newest policy version that produced one of its tokens."""
        return max(span.policy_version for sample in self.samples for span in sample.version_spans)
