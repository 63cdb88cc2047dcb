"""`penstock` whose processes record only while a switch is on, and may count what recording uses.

    python -m bench.recording.switched FOLDER train recipes/tiny-cpu.toml --episodes.keep=all

Off, no span and no trained group is kept. The connections for spans remain, and carry nothing. FOLDER has the switch,
and an account of each process if there is a folder for them; without it, nothing is counted.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.recording.account import Account
from bench.recording.counted import count_spans, count_trainer
from bench.recording.switch import Switch
from penstock.telemetry import spans

MODULE = "bench.recording.switched"
SWITCH, ACCOUNTS = "switch", "accounts"
"""What is in the folder that the processes share."""


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


def _start_switched(folder: Path) -> None:
    """Have the launcher of this process start services by this module."""
    from services.launch.process import specs

    make_spec = specs._service_spec

    def make_switched(*args: Any) -> Any:
        spec = make_spec(*args)
        return replace(spec, command=_switched(spec.command, folder))

    specs._service_spec = make_switched


def _switched(command: Sequence[str], folder: Path) -> list[str]:
    place = command.index("services.cli")
    return [*command[:place], MODULE, str(folder), *command[place + 1 :]]


def _after_import(module: str, change: Callable[[], None]) -> None:
    """Call `change` once `penstock serve` has imported `module`, as early imports would cost more than theirs."""
    serve: Any = importlib.import_module("services.cli.serve")
    import_with_extra = serve.import_with_extra

    def import_then_switch(name: str, *args: Any, **options: Any) -> Any:
        imported = import_with_extra(name, *args, **options)
        if name == module:
            change()
        return imported

    serve.import_with_extra = import_then_switch


def main() -> int:
    """Run `penstock` with the arguments behind the shared folder."""
    folder = Path(sys.argv.pop(1)).absolute()
    switch = Switch(folder / SWITCH)
    is_service = sys.argv[1] == "serve"
    account = None
    if (folder / ACCOUNTS).is_dir():
        account = Account(folder / ACCOUNTS, sys.argv[2] if is_service else "launcher")
        count_spans(account)
    switch_spans(switch)

    def change_trainer() -> None:
        if account is not None:
            count_trainer(account)
        switch_episodes(switch)

    from services.cli import main as penstock

    if sys.argv[1] == "train":
        _start_switched(folder)
    if sys.argv[1:3] == ["serve", "trainer"]:
        _after_import("services.trainer.main", change_trainer)
    return penstock()


if __name__ == "__main__":
    sys.exit(main())
