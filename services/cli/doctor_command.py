"""`penstock doctor`: checks whether this machine can run a recipe, or hosts can run it together, and gives remedies."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from penstock import config as configuration
from penstock.errors import ConfigError
from penstock.runtime import process
from penstock.runtime.imports import import_with_extra
from penstock.runtime.security import Security
from penstock.telemetry import log
from services.cli.arguments import RECIPE_HELP, load_recipes, sort_arguments
from services.cli.console import open_console
from services.doctor.examination import checks_of, examine
from services.doctor.finding import Finding, Status, blamed, fault, ok
from services.recipe import Recipe

_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAULT: "bold red"}


def doctor(
    context: typer.Context,
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE...", help=f"{RECIPE_HELP} Without one, only the machine.", show_default=False),
    ] = None,
    sft: Annotated[bool, typer.Option("--sft", help="Look at what `penstock sft` asks, not `penstock train`.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")] = False,
    serve: Annotated[
        int | None,
        typer.Option(
            "--serve",
            metavar="PORT",
            min=0,
            max=65535,
            help="Answer other hosts that ask --with this one, until Ctrl-C; 0 takes any free port.",
        ),
    ] = None,
    peers: Annotated[int, typer.Option("--peers", min=0, help="End --serve when this many hosts have asked.")] = 0,
    with_: Annotated[
        list[str] | None,
        typer.Option(
            "--with", metavar="HOST:PORT", help="Compare this host with one that runs --serve.", show_default=False
        ),
    ] = None,
) -> int:
    """Check this machine (Python, packages, GPUs and their libraries, memory, disk), and the needs of a recipe.

    --serve and --with check hosts together instead: clocks, versions, names, the shared folder of runs, ports. Nothing
    is downloaded or changed. Any --section.key=value overrides the recipe. Exits with 1 if there is a fault, with which
    a run would not start or would fail; a warning marks a run that may be slow or fail later.
    """
    _require_one_side(serve, peers, with_ or ())
    is_between_hosts = bool(with_) or serve is not None
    findings: list[Finding] = []
    settings: Recipe | None = None
    try:
        recipes, overrides = sort_arguments(recipe, context.args)
        if recipes or (overrides and not is_between_hosts):
            settings = load_recipes(recipes, overrides)
        elif overrides:
            settings = configuration.load(Recipe, [], overrides)
    except ConfigError as error:
        findings.append(blamed("recipe", error))
    if not is_between_hosts:
        findings += examine(checks_of(settings, is_sft=sft))
    elif not findings:  # without its settings, a host cannot be compared
        hosts = settings or Recipe()
        findings += _ask(hosts, with_) if with_ else _answer(hosts, serve or 0, peers)
    if as_json:
        sys.stdout.write(_as_json(findings))
    else:
        _show(findings)
    return 1 if _worst(findings) is Status.FAULT else 0


def _require_one_side(serve: int | None, peers: int, addresses: Sequence[str]) -> None:
    """Check the options by which hosts are compared.

    Raises:
        ConfigError: they contradict each other, or an address is none.
    """
    if serve is not None and addresses:
        raise ConfigError("--serve and --with are the two sides of a comparison; give one on each host")
    if peers and serve is None:
        raise ConfigError(f"--peers {peers} says when --serve ends; give --serve PORT as well")
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(
                f"--with {address!r} is no address; write HOST:PORT, as `penstock doctor --serve` prints it"
            )


def _ask(settings: Recipe, addresses: Sequence[str]) -> list[Finding]:
    """Compare this host with others."""
    asking = import_with_extra("services.doctor.hosts.asking", "penstock doctor --with", extra="router")
    security = Security.load(settings.security)
    return [finding for address in addresses for finding in asking.ask(address, settings, security)]


def _answer(settings: Recipe, port: int, num_peers: int) -> list[Finding]:
    """Answer other hosts; return whether all that are expected have asked."""
    answering = import_with_extra("services.doctor.hosts.answering", "penstock doctor --serve", extra="router")
    security = Security.load(settings.security)
    log.configure(settings.log.model_copy(update={"level": "warning"}), service="doctor")
    asked: list[str] = []

    def write(line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    async def serve(stop: asyncio.Event) -> None:
        answers = answering.answer_hosts(settings, security, port=port, num_peers=num_peers, stop=stop, write=write)
        asked.extend(await answers)

    if code := process.run(serve):
        raise typer.Exit(code)
    seen = f"{', '.join(sorted(asked)) or 'none'} asked"
    if len(asked) < num_peers:
        limit = f"{seen}, of {num_peers} that were expected within {answering.PATIENCE_S:g} s"
        return [fault("other hosts", limit, "look at what `penstock doctor --with` says on the others")]
    return [ok("other hosts", seen)]


def _worst(findings: Sequence[Finding]) -> Status:
    return max((finding.status for finding in findings), key=list(Status).index)


def _as_json(findings: Sequence[Finding]) -> str:
    checks = [{"name": each.name, "status": each.status, "seen": each.seen, "remedy": each.remedy} for each in findings]
    return json.dumps({"status": _worst(findings), "checks": checks}, indent=1) + "\n"


def _show(findings: Sequence[Finding]) -> None:
    console = open_console()
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        line = Text(f"{finding.status:<8}", style=_STYLES[finding.status])
        console.print(line.append(f"{finding.name:<{width}}  {finding.seen}", style="default"), soft_wrap=True)
        if finding.remedy:
            console.print(Text(f"{'':<8}{'':<{width}}  -> {finding.remedy}"), soft_wrap=True)
    counts = Counter(finding.status for finding in findings)
    console.print(f"{_counted(counts[Status.FAULT], 'fault')}, {_counted(counts[Status.WARNING], 'warning')}")


def _counted(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"
