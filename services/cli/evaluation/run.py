"""Runs `penstock eval`: plays the sets of a recipe with a model, and prints and stores the results."""

import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from penstock import config as configuration
from penstock.bus.buckets.lock import EVALUATION, locked
from penstock.bus.connection import Bus, connect
from penstock.clients import RewardClient
from penstock.config.sections import MAX_NAME_CHARS
from penstock.errors import ConfigError, DeadlineError, SetupError, UnavailableError
from penstock.runtime import process
from penstock.runtime.disk_space import disk_full_reported
from penstock.runtime.process import completed, end_task
from penstock.runtime.security import Security, hide_secrets
from penstock.telemetry import log
from services.cli.evaluation.begun import Begun, read_begun, require_same, require_same_rows
from services.cli.evaluation.progress import EvaluationProgress, open_progress
from services.cli.own_folder import own_folder
from services.cli.score.run import private_service, running_at
from services.launch.checks.known_names import KnownNames, require_names
from services.launch.checks.template_variables import require_template_variables
from services.launch.run_folder import RunFolder
from services.launch.run_plan import RunPlan
from services.launch.serving import serving
from services.launch.settings import service_settings
from services.launch.terminal.lasting_output import lasting_output
from services.recipe import Recipe
from services.trainer.evaluation.bus_player import play_on_bus
from services.trainer.evaluation.evaluation import OnPlayed
from services.trainer.evaluation.kept_answers import read_kept_answers, write_set_settings
from services.trainer.evaluation.openai_player import OpenAiPlayer, require_single_turn
from services.trainer.evaluation.openai_server import read_api_key
from services.trainer.evaluation.outcome import PlayedPrompt
from services.trainer.evaluation.report import (
    EVALUATIONS_FILE,
    RESULTS_FILE,
    SAMPLES_FILE,
    SamplesFile,
    describe,
    write_results,
)
from services.trainer.evaluation.samples_page import PAGE_FILE, write_page
from services.trainer.evaluation.set_files import pin_sets
from services.trainer.evaluation.sets import EvaluationSet, open_sets
from services.trainer.evaluation.summary import Summary, summarize
from services.trainer.telemetry.episodes.evaluated import log_of_evaluation
from services.trainer.telemetry.span_files import collecting_spans

_LAST_SPANS_S = 1.5
"""Seconds that processes have to record the spans that end after the last answer, on a busy machine."""
_MODEL_VERSION = 0
"""The version that engines without a trainer report for the model that they loaded."""
_EXIT_FAILED_PROMPTS = 1

Play = Callable[[OnPlayed], Awaitable[None]]


def is_over_api(folder: RunFolder) -> bool:
    """Return whether the evaluation in a folder was begun over an API, for which the recipe's model is never read.

    Raises:
        ConfigError: the folder has no evaluation that can be resumed.
    """
    return bool(read_begun(folder.path).url)


def evaluate(
    recipe: Recipe,
    security: Security,
    plan: RunPlan | None,
    *,
    url: str,
    url_model: str,
    folder: RunFolder | None = None,
) -> int:
    """Evaluate and return the exit code: 1 if prompts could not be played, 130 after Ctrl-C.

    Args:
        recipe: The recipe with the evaluation sets and the model.
        security: Tokens and TLS of the servers.
        plan: The processes that serve the model; None: an API plays.
        url: An OpenAI-compatible API that plays in place of the model; empty: none.
        url_model: That API's name of the model; empty: its only one.
        folder: Folder of the interrupted evaluation to resume, with the model or API that it was begun with; None:
            begin one.

    Raises:
        UserError: the model, a set or the machine does not meet the evaluation's needs, or the begun one differs.
    """
    begun = None
    if folder is not None:
        begun = read_begun(folder.path)
        require_same(begun, folder.path, before=configuration.load(Recipe, [folder.config_file]), now=recipe)
        url, url_model = begun.url, begun.url_model
    api_key = read_api_key() if url else ""
    model = None if url else service_settings.for_engine(recipe).model.path
    require_template_variables(recipe, model, with_sets=True)
    if plan is None:
        require_names(recipe, data=False, sets=True)
    name = recipe.run.name if begun else f"{recipe.run.name}-eval"
    if len(name) > MAX_NAME_CHARS:
        raise ConfigError(
            f"run.name = {recipe.run.name!r}: the evaluation's own name, {name!r}, has more than {MAX_NAME_CHARS} "
            "characters; give a shorter --run.name"
        )
    recipe = recipe.model_copy(
        update={
            "run": recipe.run.model_copy(update={"name": name}),
            "evaluation": pin_sets(recipe.evaluation, recipe.data),
        }
    )
    sets = open_sets(recipe.evaluation, recipe.data, require=KnownNames.of(recipe).require)
    if url:
        require_single_turn(sets)
    folder = folder or RunFolder.create(recipe.run)
    hide_secrets()
    with own_folder(folder, recipe, command="penstock eval", service="eval", is_new=begun is None):
        run = _Evaluating(recipe, folder, sets, security, begun)
        sys.stdout.write("\n".join([f"run folder {folder.path}", *([] if plan is None else plan.describe()), ""]))
        with disk_full_reported(folder.path, run.remedy_for_full_disk):
            code = 0
            if run.is_complete:
                folder.write_config(recipe)
            else:
                code = process.run(
                    lambda stop: run.over_api(stop, url, url_model, api_key) if url else run.with_engines(stop)
                )
            code = code or run.report()
    if begun is None and code == process.EXIT_USER_ERROR:
        log.close_file()
        if folder.discard_unused():
            sys.stdout.write(f"run folder {folder.path} is removed: nothing was played\n")
    return code


class _Evaluating:
    """One evaluation from its start to its results."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        sets: Mapping[str, EvaluationSet],
        security: Security,
        begun: Begun | None,
    ) -> None:
        """Evaluate in `folder`, continuing the evaluation that was `begun`, if any.

        Raises:
            ConfigError: a row differs from the one that was answered.
            DataError: a row is wrong.
        """
        self._recipe = recipe
        self._folder = folder
        self._sets = sets
        self._security = security
        self._begun = begun
        self._kept: list[PlayedPrompt] = []
        if begun is not None:
            version = None if begun.url else _MODEL_VERSION
            self._kept = read_kept_answers(folder.path, sets, version=version)
            require_same_rows(folder.path, sets, self._kept)
        self._outcomes: dict[str, list[PlayedPrompt]] = defaultdict(list)
        for outcome in self._kept:
            self._outcomes[outcome.set_name].append(outcome)
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._began = time.monotonic()

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to play."""
        return self._num_played == sum(map(len, self._sets.values()))

    @property
    def _num_played(self) -> int:
        """Prompts with an outcome, of all starts."""
        return sum(map(len, self._outcomes.values()))

    def remedy_for_full_disk(self) -> str:
        """Return how a person goes on: an evaluation without an answer cannot be resumed."""
        path = self._folder.path
        if self._begun is None:
            return f"nothing was played: make room, remove {path} and start the command again"
        return f"make room and continue with `penstock eval --resume {path}`"

    async def with_engines(self, stop: asyncio.Event) -> None:
        """Play with the recipe's model on this machine, until `stop`."""
        model = service_settings.for_engine(self._recipe).model.path
        begun = await asyncio.to_thread(Begun.with_engines, model, self._started_at)
        with lasting_output(), self._progress() as progress:  # in this order: bars replace the output too
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self._alone_on_bus())
                live, supervisor = await stack.enter_async_context(
                    serving(self._recipe, self._folder, stop, self._security, progress.write)
                )

                async def play(on_played: OnPlayed) -> None:
                    async with (
                        connect(live.bus, run=live.run.name, security=self._security) as bus,
                        self._collecting_spans(bus),
                        log_of_evaluation(
                            self._folder.path,
                            self._recipe.episodes,
                            model,
                            version=_MODEL_VERSION,
                            played=self._played,
                        ) as episodes,
                    ):
                        await play_on_bus(
                            self._sets,
                            bus,
                            version=_MODEL_VERSION,
                            on_played=on_played,
                            played=self._played,
                            episodes=episodes,
                        )

                await self._play(begun, play, progress, supervisor.wait(stop))
                if not self.is_complete:
                    progress.write("stopping; Ctrl-C again kills all processes at once")

    async def over_api(self, stop: asyncio.Event, url: str, model: str, api_key: str) -> None:
        """Play over an OpenAI-compatible API, until `stop`."""
        with lasting_output(), self._progress() as progress:  # in this order: bars replace the output too
            async with (
                self._verifier() as verifier,
                OpenAiPlayer(
                    url,
                    model=model,
                    api_key=api_key,
                    verifier=verifier,
                    concurrency=self._recipe.worker.concurrency,
                ) as player,
            ):
                begun = Begun(
                    started_at=self._started_at, model=f"{player.model} at {url}", url=url, url_model=player.model
                )

                async def play(on_played: OnPlayed) -> None:
                    await player.play(self._sets, on_played=on_played, played=self._played)

                await self._play(begun, play, progress, stop.wait())

    @asynccontextmanager
    async def _alone_on_bus(self) -> AsyncIterator[None]:
        """Hold the run's lock on a NATS that others use, too.

        Two evaluations of one name would play each other's prompts, each with its own model.

        Raises:
            SetupError: another evaluation of this name is running there.
        """
        bus = self._recipe.bus
        if not bus.url:
            yield
            return
        async with (
            connect(bus, run=self._recipe.run.name, security=self._security) as connected,
            locked(connected, EVALUATION, ttl_s=bus.lease_ttl_s),
        ):
            yield

    @asynccontextmanager
    async def _verifier(self) -> AsyncIterator[RewardClient]:
        """Yield a client of the reward service that the recipe names, else of one for this process alone.

        Raises:
            ConfigError: the named service does not know a set's profile.
            SetupError: it does not answer.
        """
        address = self._recipe.worker.reward_address
        if not address:
            async with private_service(self._recipe.reward, self._security) as client:
                yield client
            return
        async with running_at(address, self._security) as client:
            try:
                profiles = await client.list_profiles()
            except (UnavailableError, DeadlineError) as error:
                raise SetupError(
                    f"worker.reward_address = {address!r}: {error}; start a reward service there, or leave it out"
                ) from None
            known = replace(KnownNames.of(self._recipe), profile=sorted(each.name for each in profiles))
            require_names(self._recipe, data=False, sets=True, known=known)
            yield client

    def report(self) -> int:
        """Print the results, and write them if everything was played; return the exit code."""
        samples = self._folder.path / SAMPLES_FILE
        if not self.is_complete:
            num_prompts = sum(map(len, self._sets.values()))
            lines = [f"stopped after {self._num_played} of {num_prompts} prompts; their answers are in {samples}"]
            if self._begun is not None:
                lines.append(f"`penstock eval --resume {self._folder.path}` plays the others")
            sys.stdout.write("\n".join(["", *lines, ""]))
            return process.EXIT_INTERRUPTED
        summaries = {name: self._summary(name) for name in self._sets}
        elapsed_s = time.monotonic() - self._began
        write_results(
            self._folder.path, about=self._about(), version=_MODEL_VERSION, elapsed_s=elapsed_s, summaries=summaries
        )
        assert self._begun is not None, "something was played"
        write_page(self._folder.path, f"Evaluation of {self._begun.model_name}", self._sets, self._outcomes)
        lines = [
            f"model   {self._begun.model_name}",
            *describe(summaries),
            f"results {self._folder.path / RESULTS_FILE}",
        ]
        page = f"        {self._folder.path / PAGE_FILE}, some of them with their pictures"
        sys.stdout.write("\n".join(["", *lines, f"samples {samples}", page, ""]))
        sys.stdout.flush()
        return _EXIT_FAILED_PROMPTS if any(each.num_failed_prompts for each in summaries.values()) else 0

    @property
    def _played(self) -> set[tuple[str, int]]:
        """The rows that were played before this start."""
        return {(each.set_name, each.row) for each in self._kept}

    async def _play(self, begun: Begun, play: Play, progress: EvaluationProgress, ended: Awaitable[Any]) -> None:
        """Play until everything is played or `ended` returns, which means an interruption if prompts are left.

        The folder keeps the recipe from now on: nothing before has refused it.
        """
        self._folder.write_config(self._recipe)
        for outcome in self._kept:
            progress.add(outcome)
        samples = await asyncio.to_thread(SamplesFile, self._folder.path / SAMPLES_FILE, self._kept)
        for name in (RESULTS_FILE, EVALUATIONS_FILE):
            (self._folder.path / name).unlink(missing_ok=True)
        writing = asyncio.Lock()

        async def keep(outcome: PlayedPrompt) -> None:
            async with writing:
                await asyncio.to_thread(self._write, outcome, samples, begun)
            progress.add(outcome)
            self._outcomes[outcome.set_name].append(outcome)

        playing = asyncio.ensure_future(play(lambda outcome: completed(keep(outcome))))
        ending = asyncio.ensure_future(ended)
        try:
            await asyncio.wait({playing, ending}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                ending.result()
            if playing.done():
                playing.result()
        finally:
            await end_task(playing)
            await end_task(ending)

    def _write(self, outcome: PlayedPrompt, samples: SamplesFile, begun: Begun) -> None:
        """Write an outcome; before the first one, what must be equal when the evaluation is resumed."""
        if self._begun is None:
            write_set_settings(self._folder.path, self._sets)
            begun.write(self._folder.path)
            self._begun = begun
        samples.add(outcome)

    @asynccontextmanager
    async def _collecting_spans(self, bus: Bus) -> AsyncIterator[None]:
        max_gib = self._recipe.trace.max_gib
        if not max_gib:
            yield
            return
        async with collecting_spans(bus, self._folder.path, max_bytes=int(max_gib * 2**30)):
            yield
            await asyncio.sleep(_LAST_SPANS_S)

    def _progress(self) -> EvaluationProgress:
        return open_progress({name: len(each) for name, each in self._sets.items()})

    def _summary(self, name: str) -> Summary:
        config = self._sets[name].config
        return summarize(
            self._outcomes[name], samples_per_prompt=config.samples_per_prompt, pass_score=config.pass_score
        )

    def _about(self) -> dict[str, Any]:
        assert self._begun is not None, "something was played"
        return {
            "model": self._begun.model_name,
            "started_at": self._begun.started_at,
            "num_prompts_played_before": len(self._kept),
            "penstock": self._begun.penstock,
        }
