"""Who reads the wall clock: it can jump, so nothing that measures a duration may."""

import ast
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_READERS = {
    # Ages that a person is shown, measured against the stamps of the NATS server; and how long a prompt was queued.
    "services/rollout/worker/prompt_handler.py",
    "penstock/bus/stored/dead_letters.py",
    "penstock/bus/stored/stream_report.py",
    "services/cli/runs/command.py",
    # Stamps of records, answers and evaluations, and names of runs.
    "services/cli/evaluation/run.py",
    "services/launch/run_folder.py",
    "services/rollout/worker/episodes/clock.py",
    "services/router/frontends/openai/chat_api.py",
    "services/router/frontends/openai/recording.py",
    "services/router/frontends/openai/responses.py",
    "services/router/frontends/openai/sessions/call.py",
    "services/trainer/starting_point.py",
    # Stamps of rows, kept groups and spans, which are compared with those of samples; and the age of a file.
    "penstock/telemetry/spans.py",
    "services/launch/process/process_trace.py",
    "services/trainer/telemetry/span_files.py",
    "services/trainer/telemetry/episodes/log.py",
    "services/trainer/telemetry/metrics_log.py",
    "services/trainer/telemetry/trace.py",
    "services/view/export/page.py",
    "services/view/summary.py",
    # The clocks of hosts, which `penstock doctor` and the launcher on Ray compare.
    "services/doctor/hosts/asking.py",
    "services/doctor/hosts/facts.py",
    "services/launch/on_ray/cluster.py",
    "services/launch/on_ray/facts.py",
}
_WALL_CLOCK = {
    *(("time", name) for name in ("time", "time_ns", "localtime", "gmtime", "strftime", "ctime")),
    *(("datetime", name) for name in ("now", "utcnow", "today")),
    *(("date", name) for name in ("today",)),
}


def _reads(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name):
                yield owner, name
            case ast.ImportFrom(module="time", names=names):
                yield from (("time", alias.name) for alias in names)


def test_only_these_files_read_the_wall_clock() -> None:
    """docs/operation/bus.md, section Clocks, says what each does with it; everything else reads `time.monotonic`."""
    found = {
        str(file.relative_to(_ROOT))
        for folder in ("penstock", "services")
        for file in (_ROOT / folder).rglob("*.py")
        if _WALL_CLOCK.intersection(_reads(ast.parse(file.read_text(), str(file))))
    }
    assert found == _READERS
