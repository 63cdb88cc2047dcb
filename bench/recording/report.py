"""Says what recording costs: by turns with and without it, and as it counts itself. Pure."""

import statistics
from collections.abc import Iterator, Sequence

from bench.demo.processor_time import SCHEDULERS
from bench.recording.turns import Turn, compare, while_on

_SERVER = "nats-server"
"""It counts nothing; what it does for recording is known by turns with and without it."""
_ANSWERS = {True: "yes", False: "no", None: "cannot be told"}


def describe(compared: Sequence[Turn], counted: Sequence[Turn], bar: float) -> Iterator[str]:
    """Yield the lines: each turn, the comparison, and what was counted.

    Args:
        compared: Turns of a run that counts nothing.
        counted: Turns of a run that counts.
        bar: A share of a step.
    """
    yield from _each(compared)
    yield from _compared(compared, bar)
    yield ""
    yield from _each(counted)
    yield from _counted(compared, counted, bar)


def _each(turns: Sequence[Turn]) -> Iterator[str]:
    yield from ("| turn | recorded | s/step | core-s/step | counted, ms/step |", "|---|---|---|---|---|")
    for number, turn in enumerate(turns):
        recorded = "yes" if turn.is_on else "no"
        counted = 1e3 * turn.total_recorded_s
        yield f"| {number} | {recorded} | {turn.step_s:.3f} | {turn.total_core_s:.3f} | {counted:.2f} |"


def _compared(turns: Sequence[Turn], bar: float) -> Iterator[str]:
    yield from ("", "Compared: turns with and without recording, with all that it costs and all noise of a step.", "")
    yield "| process | recorded, core-s/step | not recorded | difference | at equal time of the schedulers |"
    yield "|---|---|---|---|---|"
    for kind in sorted({kind for turn in turns for kind in turn.core_s}):

        def used(turn: Turn, kind: str = kind) -> float:
            return turn.core_s.get(kind, 0.0)

        on, off = (statistics.mean(used(turn) for turn in turns if turn.is_on == wanted) for wanted in (True, False))
        found = compare(turns, used, is_relative=False)
        equal = compare(turns, used, is_relative=False, control=_schedulers) if kind != SCHEDULERS else None
        adjusted = f"{equal.mean:+.4f} ± {equal.error:.4f}" if equal else "-"
        yield f"| {kind} | {on:.3f} | {off:.3f} | {found.mean:+.4f} ± {found.error:.4f} | {adjusted} |"
    for name, value in (
        ("processor time", lambda turn: turn.total_core_s),
        ("seconds", lambda turn: turn.step_s),
    ):
        found = compare(turns, value, is_relative=True)
        equal = compare(turns, value, is_relative=True, control=_schedulers)
        yield ""
        yield (
            f"{name} of a step, recorded - not recorded, standard errors of {found.num} pairs: {found.mean:+.2%} ± "
            f"{found.error:.2%}; at equal time of the schedulers {equal.mean:+.2%} ± {equal.error:.2%}; at most "
            f"{bar:.0%}: {_ANSWERS[equal.is_at_most(bar)]}"
        )


def _counted(compared: Sequence[Turn], turns: Sequence[Turn], bar: float) -> Iterator[str]:
    yield from ("", "Counted: processor time that recording takes where it runs, while it is on.", "")
    yield from ("| process | part | ms/step |", "|---|---|---|")
    for kind, part in sorted({key for turn in turns for key in turn.recorded_s}):
        found = while_on(turns, lambda turn, key=(kind, part): turn.recorded_s.get(key, 0.0))
        if found.mean:
            yield f"| {kind} | {part} | {1e3 * found.mean:.3f} ± {1e3 * found.error:.3f} |"
    counted = while_on(turns, lambda turn: turn.total_recorded_s)
    server = compare(compared, lambda turn: turn.core_s.get(_SERVER, 0.0), is_relative=False, control=_schedulers)
    total = counted + server
    for name, found in (("all that is counted", counted), (f"{_SERVER}, compared", server), ("all", total)):
        yield f"| {name} | | {1e3 * found.mean:.2f} ± {1e3 * found.error:.2f} |"
    whole = statistics.mean(turn.total_core_s for turn in turns if not turn.is_on)
    share = total.share_of(whole)
    yield ""
    yield (
        f"counted, with {_SERVER}: {share.mean:.2%} ± {share.error:.2%} of {whole:.3f} core-s/step, standard errors of "
        f"{share.num} turns; at most {bar:.0%}: {_ANSWERS[share.is_at_most(bar)]}"
    )


def _schedulers(turn: Turn) -> float:
    return turn.core_s.get(SCHEDULERS, 0.0)
