"""Finds what `penstock env` plays: environments by name, and tasks from data or from the command line."""

import asyncio
import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penstock.environments import Environment, EnvironmentFactory, Task
from penstock.errors import ConfigError, DataError
from penstock.records import ImagePart, Message, TextPart
from penstock.runtime.imports import import_with_extra
from services.cli.environment.grading import Grading
from services.recipe import Recipe
from services.rollout.worker.environments.registry import EnvironmentRegistry

if TYPE_CHECKING:
    from services.trainer.data.sources.source import Source


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A task without its grader."""

    id: str
    messages: tuple[Message, ...]
    images: tuple[bytes, ...] = ()
    golds: tuple[str, ...] = ()
    profile: str
    tools: tuple[Mapping[str, Any], ...] = ()
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    max_turns: int | None = None

    def to_task(self, graders: Grading, *, profile: str | None, max_turns: int | None) -> Task:
        """Return the task; `profile` and `max_turns` replace the subject's own."""
        profile = profile or self.profile
        return Task(
            id=self.id,
            seed=0,
            messages=self.messages,
            images=self.images,
            golds=self.golds,
            profile=profile,
            tools=self.tools,
            extra=self.extra,
            max_turns=max_turns or self.max_turns,
            grade=graders.grade(self.golds, profile),
        )


@contextlib.contextmanager
def started(registry: EnvironmentRegistry, runner: asyncio.Runner) -> Iterator[None]:
    """Run the processes and connections of configured environments during the context.

    Raises:
        ConfigError: an environment cannot be loaded, or does not accept its arguments.
    """
    stack = contextlib.AsyncExitStack()
    runner.run(stack.enter_async_context(registry))
    try:
        yield
    finally:
        runner.run(stack.aclose())


def describe(registry: EnvironmentRegistry) -> Iterator[str]:
    """Yield a line for each environment: its name, and the first line of its docstring if it runs in this process."""
    width = max(map(len, registry.names))
    for name in registry.names:
        factory = registry.find(name)
        kind = factory.func if isinstance(factory, functools.partial) else factory
        about = (inspect.getdoc(kind) or "").partition("\n")[0] if inspect.isclass(kind) else ""
        yield f"{name:<{width}}  {about}".rstrip()


def find_factory(registry: EnvironmentRegistry, name: str, *, compat: str | None) -> EnvironmentFactory:
    """Return the factory called `name`, set to behave as in the framework `compat`.

    Raises:
        ConfigError: there is no such environment, or it has no such mode.
    """
    if name not in registry.names:
        raise ConfigError(
            f"environment {name!r} is unknown; known: {', '.join(registry.names)}; for one of yours add "
            f'--worker.environments.{name}="package.module:Class"'
        )
    factory = registry.find(name)
    if compat is None:
        return factory
    if "compat" not in inspect.signature(factory).parameters:
        raise ConfigError(f"--compat {compat}: environment {name} behaves as no other framework's; leave it out")
    compatible: EnvironmentFactory = functools.partial(cast(Callable[..., Environment], factory), compat=compat)
    compatible()  # rejects a wrong mode before anything is read
    return compatible


def question(text: str, *, golds: Sequence[str], images: Sequence[Path], profile: str) -> Subject:
    """Return a question with its pictures before it.

    Raises:
        DataError: a picture cannot be read.
    """
    parts: tuple[TextPart | ImagePart, ...] = (
        *(ImagePart(index=number) for number in range(len(images))),
        TextPart(text=text),
    )
    return Subject(
        id="question",
        messages=(Message(role="user", parts=parts),),
        images=tuple(map(_read, images)),
        golds=tuple(golds),
        profile=profile,
    )


def row_of(recipe: Recipe, number: int, *, source: str | None) -> Subject:
    """Return a row of the recipe's data, read as training reads it.

    Raises:
        ConfigError: there is no such source.
        DataError: there is no such row, or it cannot be read.
        SetupError: the package that reads data is not installed.
    """
    names = list(recipe.data.by_name)
    if source is None and len(names) > 1:
        raise ConfigError(f"--source is missing, and the data has several: {', '.join(names)}; name one of them")
    if source is not None and source not in names:
        known = ", ".join(name or "(one without a name)" for name in names)
        raise ConfigError(f"--source {source} is none of the data's: {known}; give one of these, or leave it out")
    name = names[0] if source is None else source
    import_with_extra("services.trainer.data.sources.files", "penstock env", extra="trainer").require_files(
        recipe.data.by_name[name]
    )
    opening = import_with_extra("services.trainer.data.sources.opening", "penstock env", extra="trainer")
    rows: Source = opening.open_sources(recipe.data)[name]
    if number >= len(rows):
        raise DataError(f"--row {number}: {rows.name} has {len(rows)} rows; give 0 to {len(rows) - 1}")
    example = rows[number]
    return Subject(
        id=f"row {number}",
        messages=example.messages,
        images=example.images,
        golds=example.golds,
        profile=example.profile,
        tools=example.tools,
        extra=example.extra,
        max_turns=example.limits.max_turns,
    )


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"--image {file} cannot be read: {error.strerror}; give a picture") from None
