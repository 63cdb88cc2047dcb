"""Keeps the groups of a run beside training: those that a step trained, that were left out, or that were evaluated.

Descriptions are made and written in a thread of their own. The groups that wait for it are bounded. Groups beyond the
bound are counted and not kept, and so are groups that still wait at the end and that the disk does not take in time. An
error of the disk is logged once, counted, and never reaches the run.
"""

import functools
import queue
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal, TypeAlias, TypeVar

import structlog

from penstock.bus.image_store import hash_of
from penstock.errors import DataError
from penstock.records import Group
from services.trainer.backend.base import StepTokens
from services.trainer.batching.sequences import TrainGroup
from services.trainer.data.dataset import Dataset
from services.trainer.data.rows.example import Example
from services.trainer.position import Position
from services.trainer.telemetry.episodes.choice import (
    MAX_EVALUATED,
    MAX_LEFT_OUT,
    candidate,
    choose,
    evaluated_kind,
    is_compared,
)
from services.trainer.telemetry.episodes.config import EpisodesConfig
from services.trainer.telemetry.episodes.description import (
    Fate,
    Origin,
    TokenNames,
    TrainedSample,
    describe_group,
    divergence,
    sequence_bytes,
    split_samples,
)
from services.trainer.telemetry.episodes.files import DescribedGroup, EpisodeFiles

log = structlog.get_logger()

FOLDER: Final = "episodes"
_GIB = 2**30
_MAX_WAITING_TOKENS = 8_000_000
"""Tokens of groups that wait to be written: four large batches, about 300 MB."""
_PORTION_BYTES = 2**20
"""Groups of a step are written together until they exceed this: each write of one alone costs as much as its
description."""
_CLOSE_TIMEOUT_S = 30.0
_MAX_COUNTED = 64
"""Steps and kinds whose groups are counted: those of the present step and a few before it."""

Outcome: TypeAlias = Literal["stale", "filtered", "failed"]
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedGroup:
    """A group of a batch."""

    played: Group
    ready: TrainGroup
    images: Mapping[str, bytes]
    """Encoded images of its samples, by content hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedRow:
    """The row of an evaluation set whose prompt a group answers."""

    set_name: str
    row: int
    num_rows: int
    """Rows of the set."""
    read: Callable[[int], Example]
    """Reads a row of the set; called in the thread that writes.

    Raises:
        DataError: the row cannot be read.
    """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Batch:
    """A batch that a step trained."""

    step: int
    version: int
    time: str
    groups: Sequence[TrainedGroup]
    tokens: StepTokens | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kept:
    """A group to be written."""

    group: Group
    images: Mapping[str, bytes]
    fate: Fate
    trained: Mapping[int, TrainedSample]
    """By the samples' numbers in the group."""
    row: EvaluatedRow | None = None
    """None: the data set says where its prompt comes from."""


class EpisodeLog:
    """Keeps groups; its methods but `close` return at once."""

    def __init__(
        self,
        run_folder: Path,
        config: EpisodesConfig,
        position: Position,
        *,
        dataset: Dataset | None,
        names: TokenNames,
        image_token_id: int | None = None,
        is_resumed: bool = True,
    ) -> None:
        """Continue after the step of `position`. Blocks.

        Args:
            run_folder: The run folder.
            config: What is kept.
            position: The run's position.
            dataset: The data set from which the groups are played; None: only evaluated groups are kept.
            names: Returns the text of each token, for people; called in the thread that writes.
            image_token_id: The placeholder of an image; None if the model takes none.
            is_resumed: Whether there is a checkpoint. Without one the run starts over, and nothing kept before is its.
        """
        self.num_dropped = 0
        """Groups that should have been kept and were not, since the trainer started."""
        self._config = config
        self._position = position
        self._dataset = dataset
        self._names = names
        self._image_token_id = image_token_id
        self._left_out: dict[tuple[int, str], int] = {}  # groups by step and outcome
        self._evaluated: dict[tuple[int, str, str], int] = {}  # groups by step, set and what is wrong with them
        self._waiting: queue.SimpleQueue[tuple[_Batch | _Kept, int] | None] = queue.SimpleQueue()
        self._num_waiting_tokens = 0
        self._num_waiting_groups = 0
        """Groups that are neither written nor dropped nor left out, as far as they were looked at."""
        self._is_closed = False
        self._lock = threading.Lock()
        self._has_warned = False
        last_step = position.step if is_resumed else -1
        self._files = EpisodeFiles(run_folder / FOLDER, last_step=last_step, max_bytes=config.max_gib * _GIB)
        self._thread = threading.Thread(target=self._write_all, name="episodes", daemon=True)
        self._thread.start()

    def keep_trained(self, step: int, version: int, groups: Sequence[TrainedGroup], tokens: StepTokens | None) -> None:
        """Keep groups of a batch that was trained.

        Args:
            step: Number of the step.
            version: The policy version that it trained.
            groups: The batch, in the order in which the backend got it.
            tokens: What the backend computed of it.
        """
        self._put(
            _Batch(step=step, version=version, time=_now(), groups=groups, tokens=tokens),
            [each.played for each in groups],
        )

    def keep_left_out(
        self, outcome: Outcome, reason: str, group: Group, images: Mapping[str, bytes] | None = None
    ) -> None:
        """Keep a group that is not trained.

        Args:
            outcome: What became of it.
            reason: Why.
            group: The group as it was played; it may have no samples.
            images: Encoded images of its samples by content hash, if they were fetched.
        """
        step, version = self._position.step + 1, self._position.version
        number = _count(self._left_out, (step, outcome))
        if self._config.keep == "all" or number <= MAX_LEFT_OUT:
            fate = Fate(outcome=outcome, reason=reason, step=step, version=version, time=_now())
            self._put(_Kept(group=group, images=images or {}, fate=fate, trained={}), [group])

    def why_keep_evaluated(self, step: int, row: EvaluatedRow, group: Group, *, pass_score: float) -> str | None:
        """Return the reason to keep a group of an evaluation, empty if all are kept; None if it is not kept.

        Call it once for each group, before `keep_evaluated`.

        Args:
            step: Steps taken to reach the weights that were evaluated.
            row: The row that it answers.
            group: The group as it was played; it may have no samples.
            pass_score: Smallest reward of a correct sample.
        """
        if self._config.keep == "all":
            return ""
        if is_compared(row.row, row.num_rows):
            return "in every evaluation"
        kind = "cut off or failed" if group.error else evaluated_kind(candidate(group, None), pass_score=pass_score)
        if not kind:
            return None
        number = _count(self._evaluated, (step, row.set_name, kind))
        return kind if number <= MAX_EVALUATED else None

    def keep_evaluated(
        self, reason: str, step: int, version: int, row: EvaluatedRow, group: Group, images: Mapping[str, bytes]
    ) -> None:
        """Keep a group of an evaluation.

        Args:
            reason: Why.
            step: Steps taken to reach the weights that were evaluated.
            version: Their version.
            row: The row that it answers.
            group: The group as it was played; it may have no samples.
            images: Encoded images of its samples by content hash, as far as they are there; the prompt's need not be.
        """
        fate = Fate(outcome="evaluated", reason=reason, step=step, version=version, time=_now())
        self._put(_Kept(group=group, images=images, fate=fate, trained={}, row=row), [group])

    def close(self) -> None:
        """Write what waits, for a limited time; count the rest as dropped, as all groups that come later. Blocks."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self.num_dropped += self._num_waiting_groups
            num_dropped, num_unwritten = self.num_dropped, self._num_waiting_groups
        if num_dropped:
            log.warning("episodes.dropped", num_groups=num_dropped, num_unwritten_at_end=num_unwritten)

    def _put(self, job: _Batch | _Kept, groups: Sequence[Group]) -> None:
        num_tokens = _num_tokens(groups)
        with self._lock:
            if self._is_closed or self._num_waiting_tokens > _MAX_WAITING_TOKENS:
                self.num_dropped += len(groups)
                return
            self._num_waiting_tokens += num_tokens
            self._num_waiting_groups += len(groups)
        self._waiting.put((job, num_tokens))

    def _write_all(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            job, num_tokens = waiting
            groups = [each.played for each in job.groups] if isinstance(job, _Batch) else [job.group]
            try:
                chosen = self._chosen(job) if isinstance(job, _Batch) else [job]
                self._no_longer_waiting(len(groups) - len(chosen))
            except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on
                self._drop(groups, error)
                chosen = []
            for portion in self._portions(chosen):
                try:
                    self._files.add(chosen[0].fate.step, [described for _, described in portion])
                    self._no_longer_waiting(len(portion))
                except Exception as error:  # noqa: BLE001 - the same
                    self._drop([group for group, _ in portion], error)
            with self._lock:
                self._num_waiting_tokens -= num_tokens

    def _no_longer_waiting(self, num_groups: int) -> None:
        with self._lock:
            self._num_waiting_groups -= num_groups

    def _drop(self, groups: Sequence[Group], error: Exception) -> None:
        with self._lock:
            self.num_dropped += 0 if self._is_closed else len(groups)
            self._num_waiting_groups -= len(groups)
        if not self._has_warned:
            self._has_warned = True
            log.warning("episodes.not_kept", group=groups[0].id.message, reason=repr(error))

    def _chosen(self, batch: _Batch) -> list[_Kept]:
        """Return the groups of a batch that are kept, and why.

        Which are chosen is known only when all have been looked at: an error is one of the whole batch.
        """
        computed = {} if batch.tokens is None else split_samples(batch.tokens)
        trained, first = [], 0
        for each in batch.groups:
            num = len(each.ready.samples)
            places = enumerate(each.ready.numbers or range(num), start=first)
            trained.append({number: computed[place] for place, number in places if place in computed})
            first += num
        reasons: dict[int, list[str]] = {number: [] for number in range(len(batch.groups))}
        if self._config.keep == "few":
            candidates = [
                candidate(each.played, divergence(sequence_bytes(each.played), samples))
                for each, samples in zip(batch.groups, trained, strict=True)
            ]
            reasons = choose(candidates, batch.step)
        return [
            _Kept(
                group=batch.groups[number].played,
                images=batch.groups[number].images,
                fate=Fate(
                    outcome="trained", reason=", ".join(why), step=batch.step, version=batch.version, time=batch.time
                ),
                trained=trained[number],
            )
            for number, why in reasons.items()
        ]

    def _portions(self, chosen: Sequence[_Kept]) -> Iterator[list[tuple[Group, DescribedGroup]]]:
        """Describe groups, and yield those that are written together; one that cannot be described is dropped."""
        portion: list[tuple[Group, DescribedGroup]] = []
        num_bytes = 0
        for kept in chosen:
            try:
                described = self._describe(kept)
            except Exception as error:  # noqa: BLE001 - the other groups are kept
                self._drop([kept.group], error)
                continue
            portion.append((kept.group, described))
            num_bytes += len(described.whole)
            if num_bytes >= _PORTION_BYTES:
                yield portion
                portion, num_bytes = [], 0
        if portion:
            yield portion

    def _describe(self, kept: _Kept) -> DescribedGroup:
        """Describe a group; its images are written."""
        origin = self._origin(kept)
        images = () if origin.example is None else origin.example.images
        shown = [hash_of(image) for image in images]
        files = self._files.add_images({**kept.images, **dict(zip(shown, images, strict=True))})
        whole, short = describe_group(
            kept.group,
            origin,
            kept.fate,
            kept.trained,
            names=self._names,
            image_files=files,
            prompt_images=[files[sha256] for sha256 in shown],
            image_token_id=self._image_token_id,
        )
        return DescribedGroup.of(whole, short, image_files=files.values())

    def _origin(self, kept: _Kept) -> Origin:
        """Read the row that was played; it may have been changed since."""
        read: Callable[[], Example]
        if kept.row is None:
            assert self._dataset is not None, "the group is not of an evaluation"
            source, row = self._dataset.row_at(kept.group.id.index)
            read = functools.partial(self._dataset.__getitem__, kept.group.id.index)
        else:
            source, row = source_of(kept.row.set_name), kept.row.row
            read = functools.partial(kept.row.read, row)
        try:
            example = read()
        except DataError:
            example = None
        return Origin(source=source, row=row, example=example)


def source_of(set_name: str) -> str:
    """Return what descriptions have as the source of an evaluation set's rows."""
    return f"eval/{set_name}"


def _count(counts: dict[_Key, int], key: _Key) -> int:
    """Count one more under `key`, and forget the key that was counted longest ago if there are too many."""
    number = counts[key] = counts.pop(key, 0) + 1
    if len(counts) > _MAX_COUNTED:
        del counts[next(iter(counts))]
    return number


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _num_tokens(groups: Sequence[Group]) -> int:
    return sum(len(sequence.token_ids) for group in groups for sample in group.samples for sequence in sample.sequences)
