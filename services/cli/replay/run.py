"""`penstock replay`: recomputes a recorded optimizer step and shows it beside the run's log."""

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.table import Table

from penstock.errors import ConfigError
from services.cli.console import open_console
from services.cli.interruption import interruptible
from services.trainer.replay.comparison import Line, Value, compare, verdict
from services.trainer.replay.replay import replay_step, start_of
from services.trainer.replay.run import export_step, opened_run, require_new

_EXIT_DIFFERS = 1


@interruptible()
def replay(source: Path, *, step: int | None, overrides: Sequence[str], export: Path | None) -> int:
    """Replay a step, print both sides, and return the exit code: 1 if the replay differs from the run.

    Args:
        source: A run folder, or a file that an export wrote.
        step: The step's number; None takes the only recorded step.
        overrides: `--section.key=value`, to show the same step under other settings.
        export: File to write the step to, with everything that its replay needs.

    Raises:
        UserError: an input of the replay is missing or wrong.
    """
    other_settings = [override for override in overrides if not override.startswith("--model.")]
    if export is not None and other_settings:
        raise ConfigError(f"--export writes the step as recorded; leave out {other_settings[0]}")
    if export is not None:
        require_new(export)
    with opened_run(source) as run, TemporaryDirectory(prefix="penstock-replay-") as scratch:
        step = run.only_step() if step is None else step
        recording, wanted = run.recording(step), run.recording(step, overrides).settings
        start = start_of(run, step, model_path=wanted.model.path, scratch=Path(scratch))
        base = wanted.model.path
        replayed = replay_step(start, recording, recording.settings, model_path=base)
        changed = replay_step(start, recording, wanted, model_path=base) if other_settings else None
        lines = compare(recording.inputs, run.metrics(step), replayed, changed)
        if export is not None:
            export_step(run, step, start, export)
    _print(lines, other_settings)
    agrees = verdict(lines)
    said = {
        True: "is reproduced bit for bit",
        False: "differs from the recorded step",
        None: "has no recorded results: the run ended during it, or resumed from an earlier step",
    }[agrees]
    sys.stdout.write(f"step {step} of {recording.inputs.run_id} {said}\n")
    if agrees is False:
        for name, recorded, here in recording.inputs.environment.differences(replayed.environment):
            sys.stdout.write(f"  {name}: recorded with {recorded}, replayed with {here}\n")
    if export is not None:
        sys.stdout.write(f"exported to {export}, {export.stat().st_size / 1e6:.1f} MB\n")
    return _EXIT_DIFFERS if agrees is False else 0


def _print(lines: Sequence[Line], overrides: Sequence[str]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("recorded", justify="right", no_wrap=True)
    table.add_column("replayed", justify="right", no_wrap=True)
    table.add_column("")
    if overrides:
        table.add_column(" ".join(overrides), justify="right")
    for line in lines:
        cells = [line.name, _shown(line.recorded), _shown(line.replayed), _said(line)]
        table.add_row(*cells, *([_shown(line.changed)] if overrides else []))
    open_console().print(table)


def _said(line: Line) -> str:
    return {True: "same", False: "DIFFERS", None: ""}[line.agrees]


def _shown(value: Value) -> str:
    return "-" if value is None else value if isinstance(value, str) else repr(value)
