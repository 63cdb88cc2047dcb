"""`penstock doctor`: checks whether this machine can run a recipe, and gives remedies."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from penstock.errors import ConfigError
from services.cli.arguments import RECIPE_HELP, load_recipes, sort_arguments
from services.cli.console import open_console
from services.doctor.examination import checks_of, examine
from services.doctor.finding import Finding, Status, blamed
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
) -> int:
    """Check this machine (Python, packages, GPUs and their libraries, memory, disk), and the needs of a recipe.

    Nothing is started, downloaded or changed. Any --section.key=value overrides the recipe. Exits with 1 if there is a
    fault, with which a run would not start or would fail; a warning marks a run that may be slow or fail later.
    """
    findings: list[Finding] = []
    settings: Recipe | None = None
    try:
        recipes, overrides = sort_arguments(recipe, context.args)
        if recipes or overrides:
            settings = load_recipes(recipes, overrides)
    except ConfigError as error:
        findings.append(blamed("recipe", error))
    findings += examine(checks_of(settings, is_sft=sft))
    if as_json:
        sys.stdout.write(_as_json(findings))
    else:
        _show(findings)
    return 1 if _worst(findings) is Status.FAULT else 0


def _worst(findings: Sequence[Finding]) -> Status:
    return max((finding.status for finding in findings), key=list(Status).index)


def _as_json(findings: Sequence[Finding]) -> str:
    checks = [{"name": each.name, "status": each.status, "seen": each.seen, "remedy": each.remedy} for each in findings]
    return json.dumps({"status": _worst(findings), "checks": checks}, indent=1, ensure_ascii=False) + "\n"


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
