"""`penstock` whose processes record only while a switch is on.

    python -m bench.recording.switched SWITCH train recipes/tiny-cpu.toml --episodes.keep=all

Off, no span and no trained group is kept. The connections for spans remain, and carry nothing.
"""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.recording.switch import Switch
from penstock.telemetry import spans

MODULE = "bench.recording.switched"


def switch_spans(switch: Switch) -> None:
    """Have this process keep spans only while `switch` is on."""
    record = spans.record

    def record_if_on(name: str, began: float, ended: float | None = None, /, **attributes: Any) -> None:
        if switch.is_on:
            record(name, began, ended, **attributes)

    spans.record = record_if_on


def switch_episodes(switch: Switch) -> None:
    """Have the trainer of this process keep groups only while `switch` is on."""
    from services.trainer.loop import TrainingLoop
    from services.trainer.telemetry.episodes.log import EpisodeLog

    _if_on(switch, TrainingLoop, "_keep_episodes")
    _if_on(switch, EpisodeLog, "keep_left_out")


def _if_on(switch: Switch, owner: type, name: str) -> None:
    method = getattr(owner, name)

    def call_if_on(*args: Any, **options: Any) -> None:
        if switch.is_on:
            method(*args, **options)

    setattr(owner, name, call_if_on)


def _start_switched(file: Path) -> None:
    """Have the launcher of this process start services by this module."""
    from services.launch.process import specs

    make_spec = specs._service_spec

    def make_switched(*args: Any) -> Any:
        spec = make_spec(*args)
        return replace(spec, command=_switched(spec.command, file))

    specs._service_spec = make_switched


def _switched(command: Sequence[str], file: Path) -> list[str]:
    place = command.index("services.cli")
    return [*command[:place], MODULE, str(file), *command[place + 1 :]]


def _after_import(module: str, switch: Switch) -> None:
    """Switch episodes once `penstock serve` has imported `module`, as early imports would cost more than theirs."""
    serve: Any = importlib.import_module("services.cli.serve")
    import_with_extra = serve.import_with_extra

    def import_then_switch(name: str, *args: Any, **options: Any) -> Any:
        imported = import_with_extra(name, *args, **options)
        if name == module:
            switch_episodes(switch)
        return imported

    serve.import_with_extra = import_then_switch


def main() -> int:
    """Run `penstock` with the arguments behind the file of the switch."""
    file = Path(sys.argv.pop(1)).absolute()
    switch = Switch(file)
    switch_spans(switch)
    from services.cli import main as penstock

    if sys.argv[1] == "train":
        _start_switched(file)
    if sys.argv[1:3] == ["serve", "trainer"]:
        _after_import("services.trainer.main", switch)
    return penstock()


if __name__ == "__main__":
    sys.exit(main())
