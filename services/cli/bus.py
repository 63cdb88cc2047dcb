"""`penstock bus`: the messages in a run's streams, and its dead letters."""

import asyncio
import dataclasses
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from penstock import config as configuration
from penstock import shipped
from penstock.config import LogConfig
from penstock.errors import ConfigError
from penstock.runtime.security import Security
from penstock.telemetry import log
from services.cli.arguments import RecipeGroup, overrides_of
from services.cli.console import describe_age, open_console
from services.recipe import Recipe

if TYPE_CHECKING:
    from penstock.bus.connection import Bus
    from penstock.bus.stored.stream_report import StreamReport

_HELP = """List the streams of a run and how much waits in each; show or re-queue dead letters.

Any --section.key=value overrides the recipe: with --url, --security.key=value says how NATS is reached.
"""

app = typer.Typer(cls=RecipeGroup, help=_HELP, invoke_without_command=True)

ResultT = TypeVar("ResultT")

Config = Annotated[
    list[Path] | None,
    typer.Option(
        "--config",
        help="Recipe (TOML): the live.toml in a run folder; a further --config overrides it.",
        show_default=False,
    ),
]
Url = Annotated[str, typer.Option("--url", metavar="NATS_URL", help="NATS; default: the recipe's bus.url.")]
Run = Annotated[str, typer.Option("--run", metavar="NAME", help="Name of the run; default: the recipe's.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Number = Annotated[
    int, typer.Argument(metavar="NUMBER", help="The letter's number, as `penstock bus letters` lists it.")
]


@app.callback()
def list_streams(
    context: typer.Context, config: Config = None, url: Url = "", run: Run = "", as_json: Json = False
) -> int:
    """List the streams of a run: messages, bytes, age of the oldest message, and each consumer's backlog."""
    if context.invoked_subcommand is not None:
        if config or url or run or as_json:
            raise ConfigError(f"options of `penstock bus {context.invoked_subcommand}` come after its name")
        return 0
    from penstock.bus.stored.stream_report import (
        report_streams,  # imports NATS, so only after the arguments are checked
    )

    streams = _on_bus(report_streams, context, config, url, run)
    if as_json:
        _print_json([dataclasses.asdict(stream) for stream in streams])
    else:
        _print_streams(streams)
    return 0


@app.command()
def letters(
    context: typer.Context,
    config: Config = None,
    url: Url = "",
    run: Run = "",
    as_json: Json = False,
    after: Annotated[int, typer.Option("--after", min=0, help="Only letters with a higher number.")] = 0,
    limit: Annotated[int, typer.Option("--limit", min=1, help="The most letters to list.")] = 100,
) -> int:
    """List the dead letters: messages that were given up, each with its reason."""
    from penstock.bus.stored.dead_letters import list_letters

    found = _on_bus(lambda bus: list_letters(bus, after=after, limit=limit), context, config, url, run)
    if as_json:
        _print_json([_described(letter) for letter in found])
        return 0
    for letter in found:
        sys.stdout.write(f"{letter.number}  {letter.message_id}  {describe_age(letter.age_s)} ago  {letter.reason}\n")
    return 0


@app.command()
def show(context: typer.Context, number: Number, config: Config = None, url: Url = "", run: Run = "") -> int:
    """Print a dead letter as JSON, whatever record it holds: bytes and arrays as sizes, long text cut."""
    from penstock.bus.stored.dead_letters import read_letter, show_payload

    letter = _on_bus(lambda bus: read_letter(bus, number), context, config, url, run)
    _print_json({**_described(letter), "payload": show_payload(letter.payload)})
    return 0


@app.command()
def requeue(context: typer.Context, number: Number, config: Config = None, url: Url = "", run: Run = "") -> int:
    """Put a dead letter back on its queue.

    A trainer ignores a group that it has already counted, so re-queueing the letter of a settled group has no effect.
    """
    from penstock.bus.stored.dead_letters import requeue_letter

    letter = _on_bus(lambda bus: requeue_letter(bus, number), context, config, url, run)
    sys.stdout.write(f"message {letter.message_id} is back on queue {letter.subject}\n")
    return 0


def _on_bus(
    ask: "Callable[[Bus], Awaitable[ResultT]]", context: typer.Context, config: list[Path] | None, url: str, run: str
) -> ResultT:
    overrides = [*overrides_of(context), *([f"--bus.url={url}"] if url else [])]
    recipe = configuration.load(Recipe, [shipped.find_recipe(path) for path in config or ()], overrides)
    log.configure(LogConfig(level="warning"), service="bus")
    if not recipe.bus.url:
        raise ConfigError("bus.url is empty: give --url nats://HOST:PORT and --run NAME, or --config RUN/live.toml")

    async def asking() -> ResultT:
        from penstock.bus.connection import connect  # imports NATS, so only after the arguments are checked
        from penstock.bus.stored.dead_letters import has_letters
        from penstock.bus.stored.stream_report import report_streams

        name = run or recipe.run.name
        async with connect(recipe.bus, run=name, security=Security.load(recipe.security)) as bus:
            if not await has_letters(bus) and not await report_streams(bus, with_ages=False):
                raise ConfigError(
                    f"run {name!r} has no streams on NATS at {recipe.bus.url}; "
                    f"`penstock runs list --url {recipe.bus.url}` lists those that have"
                )
            return await ask(bus)

    return asyncio.run(asking())


def _described(letter: Any) -> dict[str, Any]:
    values: dict[str, Any] = dataclasses.asdict(letter)
    return values | {"payload": f"<{len(values['payload'])} bytes>"}


def _print_streams(streams: "list[StreamReport]") -> None:
    from rich.table import Table

    table = Table("stream", "messages", "MiB", "oldest", "consumer", "pending", "in hand", "redelivered", box=None)
    for stream in streams:
        age = "" if stream.oldest_age_s is None else describe_age(stream.oldest_age_s)
        row = [stream.name, str(stream.num_messages), f"{stream.size_bytes / 2**20:.1f}", age]
        for consumer in stream.consumers:
            counts = (consumer.num_pending, consumer.num_in_hand, consumer.num_redelivered)
            table.add_row(*row, consumer.name, *map(str, counts))
            row = ["", "", "", ""]
        if not stream.consumers:
            table.add_row(*row)
    open_console().print(table)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
