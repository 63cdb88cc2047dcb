"""Runs evaluations during training: decides which are due, plays them at the announced version, stores the results.

    evaluations.jsonl           one line for each evaluation: step, version, and each set's numbers
    evaluations/step-000020/    samples.jsonl: the answers; samples.html: some with pictures; sets.json: settings

Invariants: each step has at most one line; a step's line describes the weights that the surviving history has at that
step, and one version. If replicas are held out, training goes on beside the evaluation, and a restarted trainer resumes
it (docs/adr/0017); otherwise the loop publishes nothing before `evaluate` has returned (docs/adr/0016).
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path

import structlog

from penstock.bus.connection import Bus
from penstock.bus.image_store import ImageStore
from penstock.records import Group, GroupId
from penstock.runtime.process import completed
from penstock.telemetry.json_lines import JsonLinesFollower, append_lines
from services.trainer.evaluation.config import EvaluationConfig
from services.trainer.evaluation.evaluation import Evaluation
from services.trainer.evaluation.holding import Interrupted, ReplicaHolding, find_interrupted, folder_of
from services.trainer.evaluation.kept_answers import read_kept_answers, write_set_settings
from services.trainer.evaluation.outcome import PlayedPrompt
from services.trainer.evaluation.report import EVALUATIONS_FILE, SAMPLES_FILE, SamplesFile, evaluation_line
from services.trainer.evaluation.samples_page import write_page
from services.trainer.evaluation.sets import EvaluationSet
from services.trainer.evaluation.summary import Summary, summarize
from services.trainer.telemetry.episodes.evaluated import keeping
from services.trainer.telemetry.episodes.log import EpisodeLog
from services.trainer.telemetry.metrics_log import keep_steps
from services.trainer.telemetry.prometheus import EVALUATION_SCORE
from services.trainer.telemetry.trackers import Trackers
from services.trainer.weight_sync.held_out.hold_out import HoldOut

log = structlog.get_logger()


class Evaluator:
    """The evaluations of a run."""

    def __init__(
        self,
        config: EvaluationConfig,
        sets: Mapping[str, EvaluationSet],
        *,
        bus: Bus,
        images: ImageStore,
        trackers: Trackers,
        folder: Path,
        run_id: str,
        epoch: str,
        step: int,
        num_steps: int,
        holding: ReplicaHolding | None = None,
        is_resumed: bool = True,
        episodes: EpisodeLog | None = None,
    ) -> None:
        """Continue after the checkpoint of `step`; call `open` before any other method.

        Args:
            config: When evaluations are due.
            sets: Sets to play.
            bus: The bus, whose queues the workers use.
            images: Stores the prompts' images.
            trackers: Receive each evaluation's numbers.
            folder: The run folder.
            run_id: Identity of the run.
            epoch: This start of the trainer.
            step: Optimizer steps taken.
            num_steps: Optimizer steps of the whole run.
            holding: Holds replicas out of pushes; None never does.
            is_resumed: Whether there is a checkpoint. Without one the run starts over, perhaps with another model, and
                so do its evaluations.
            episodes: Keeps groups for people to read.
        """
        self._config = config
        self._sets = sets
        self._bus = bus
        self._images = images
        self._trackers = trackers
        self._folder = folder
        self._run_id = run_id
        self._epoch = epoch
        self._num_steps = num_steps
        self._holding = holding
        self._episodes = episodes
        self._last_step = step if is_resumed else -1
        """The last step whose weights the surviving history has."""
        self._done: set[int] = set()
        self._interrupted: Interrupted | None = None
        self._interrupted_hold_out: HoldOut | None = None
        self._playing: int | None = None
        """The step whose weights are being evaluated."""
        self._current: Evaluation | None = None

    def is_due(self, step: int) -> bool:
        """Return whether the weights of `step` must be evaluated, and neither have been nor are being."""
        config = self._config
        wanted = (
            (config.at_start and step == 0)
            or (config.at_end and step == self._num_steps)
            or (config.every > 0 and step > 0 and step % config.every == 0)
        )
        is_interrupted = self._interrupted is not None and self._interrupted.step == step
        return wanted and step not in self._done and step != self._playing and not is_interrupted

    async def open(self) -> None:
        """Read the evaluations in the run folder and remove those of lost weights. Call before anything is published.

        Replicas that an interrupted evaluation held out are held out again; otherwise none are.

        Raises:
            SupersededError: another trainer has taken over.
        """
        self._done = await asyncio.to_thread(_keep_until, self._folder, self._last_step)
        self._interrupted = await asyncio.to_thread(find_interrupted, self._folder, self._last_step, done=self._done)
        if self._holding is None:
            return
        if self._interrupted is None:
            await self._holding.clear()
        else:
            self._interrupted_hold_out = await self._holding.go_on(self._interrupted)

    @property
    def interrupted(self) -> tuple[int, int] | None:
        """Step and version of the interrupted evaluation for `go_on`; None if there is none."""
        return None if self._interrupted is None else (self._interrupted.step, self._interrupted.kept.version)

    async def go_on(self, *, has_received_all: Callable[[], Awaitable[bool]]) -> None:
        """Play the rest of the evaluation that an earlier trainer began, with the same version; call `open` first.

        Raises:
            DataError: a row cannot be read or sent, or no row of a set can be played.
            SetupError: NATS lost the run's state.
            SupersededError: another trainer has taken over.
        """
        interrupted, hold_out = self._interrupted, self._interrupted_hold_out
        assert interrupted is not None, "there is something to go on with"
        assert hold_out is not None, "replicas are held out for it"
        version = interrupted.kept.version
        outcomes = await asyncio.to_thread(
            read_kept_answers, folder_of(self._folder, interrupted.step), self._sets, version=version
        )
        await hold_out.until_some()
        await self._play(interrupted.step, version, outcomes, hold_out=hold_out, has_received_all=has_received_all)
        self._interrupted = self._interrupted_hold_out = None

    async def evaluate(
        self,
        step: int,
        version: int,
        *,
        has_received_all: Callable[[], Awaitable[bool]],
        on_held_out: Callable[[], None] | None,
    ) -> None:
        """Play every set with `version`, which must be announced and published.

        It must remain the published version until this returns, or until `on_held_out` is called.

        Args:
            step: Optimizer steps taken to reach the version.
            version: The version that plays.
            has_received_all: As for `Evaluation`.
            on_held_out: Called once replicas are held out, so that others may get newer versions; None: training has
                ended, and all replicas play.

        Raises:
            DataError: a row cannot be read or sent, or no row of a set can be played.
            SetupError: NATS lost the run's state.
            SupersededError: another trainer has taken over.
        """
        hold_out = None
        if self._holding is not None and on_held_out is not None:
            hold_out = await self._holding.begin(step, version)
            if hold_out is not None:
                self._playing = step
                on_held_out()
        await self._play(step, version, [], hold_out=hold_out, has_received_all=has_received_all)

    async def _play(
        self,
        step: int,
        version: int,
        played: Sequence[PlayedPrompt],
        *,
        hold_out: HoldOut | None,
        has_received_all: Callable[[], Awaitable[bool]],
    ) -> None:
        """Play the rows that `played` lacks, and report all of them."""
        started = time.monotonic()
        outcomes: dict[str, list[PlayedPrompt]] = defaultdict(list)
        for outcome in played:
            outcomes[outcome.set_name].append(outcome)
        folder = folder_of(self._folder, step)
        folder.mkdir(parents=True, exist_ok=True)
        log.info(
            "evaluation.began",
            step=step,
            version=version,
            num_prompts=sum(map(len, self._sets.values())),
            num_played=len(played),
            num_held_out=0 if hold_out is None else len(hold_out.replica_ids),
        )
        self._playing = step
        try:
            samples = await asyncio.to_thread(SamplesFile, folder / SAMPLES_FILE, played)
            await asyncio.to_thread(write_set_settings, folder, self._sets)

            async def keep(outcome: PlayedPrompt) -> None:
                await asyncio.to_thread(samples.add, outcome)
                outcomes[outcome.set_name].append(outcome)

            self._current = Evaluation(
                self._sets,
                bus=self._bus,
                images=self._images,
                run_id=f"{self._run_id}-step-{step}",
                epoch=self._epoch,
                version=version,
                on_played=lambda outcome: completed(keep(outcome)),
                has_received_all=has_received_all,
                played={(each.set_name, each.row) for each in played},
                num_slots=None if hold_out is None else hold_out.num_slots,
                on_group=None
                if self._episodes is None
                else keeping(self._episodes, self._sets, self._images, step=step, version=version),
            )
            try:
                await self._current.run()
            finally:
                self._current = None
            elapsed_s = time.monotonic() - started
            title = f"Evaluation of step {step}, policy version {version}"
            await asyncio.to_thread(write_page, folder, title, self._sets, outcomes)
            summaries = await asyncio.to_thread(self._summaries, outcomes)  # seconds for many samples a prompt
            await completed(self._report(step, version, elapsed_s, summaries, hold_out))
        finally:
            self._playing = None  # only after the report: until then the step would be due again
        if hold_out is not None:
            assert self._holding is not None
            await self._holding.end(step)

    async def receive(self, group: Group) -> None:
        """Take a group of an evaluation; ignore one that is no longer awaited.

        Raises:
            DataError: no row of its set can be played.
        """
        if self._current is not None:
            await self._current.receive(group)

    async def fail(self, group_id: GroupId, reason: str) -> bool:
        """Give up a row whose group cannot be read; return False if it does not belong to the current evaluation.

        Raises:
            DataError: no row of its set can be played.
        """
        if self._current is None or not self._current.owns(group_id):
            return False
        await self._current.fail(group_id, reason)
        return True

    async def _report(
        self,
        step: int,
        version: int,
        elapsed_s: float,
        summaries: Mapping[str, Summary],
        hold_out: HoldOut | None,
    ) -> None:
        num_held_out = 0 if hold_out is None else len(hold_out.replica_ids)
        line = evaluation_line(step, version, elapsed_s=elapsed_s, num_held_out=num_held_out, summaries=summaries)
        await asyncio.to_thread(append_lines, self._folder / EVALUATIONS_FILE, line, is_synced=True)
        self._done.add(step)
        for name, each in summaries.items():
            if each.score is not None:
                EVALUATION_SCORE.labels(name).set(each.score.value)
        values = dict(pair for name, each in summaries.items() for pair in _values(name, each))
        log.info("evaluation.ended", step=step, version=version, elapsed_s=round(elapsed_s, 3), **values)
        self._trackers.log({"step": step, **values})

    def _summaries(self, outcomes: Mapping[str, list[PlayedPrompt]]) -> dict[str, Summary]:
        configs = {name: each.config for name, each in self._sets.items()}
        return {
            name: summarize(outcomes[name], samples_per_prompt=config.samples_per_prompt, pass_score=config.pass_score)
            for name, config in configs.items()
        }


def _values(name: str, summary: Summary) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a set for trackers and logs."""
    if summary.score is not None:
        yield f"eval/{name}/score", summary.score.value
        if summary.score.standard_error is not None:
            yield f"eval/{name}/score_error", summary.score.standard_error
    yield from ((f"eval/{name}/pass_at_{k}", each.value) for k, each in summary.pass_at.items() if k > 1)
    yield from ((f"eval/{name}/maj_at_{k}", each.value) for k, each in summary.majority_at.items())
    yield f"eval/{name}/truncated_fraction", summary.truncated_fraction
    yield f"eval/{name}/num_failed_prompts", summary.num_failed_prompts


def _keep_until(folder: Path, step: int) -> set[int]:
    """Move the lines of later steps to a separate file, and return the steps of the others. Blocks."""
    path = folder / EVALUATIONS_FILE
    keep_steps(path, last_step=step)
    return {row["step"] for row in JsonLinesFollower(path).poll()}
