"""What recording costs, found in one run whose steps are noisy and drift."""

import math
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.recording import switched
from bench.recording.switch import Switch
from bench.recording.turns import Estimate, Turn, Turns, compare
from penstock.telemetry import spans
from services.launch.process import specs
from services.launch.process.spec import ProcessSpec, StopPhase
from services.trainer.loop import TrainingLoop
from services.trainer.telemetry.episodes.log import EpisodeLog


def turns_of(seed: int, *, effect: float, lingers_s: float = 6.0, settle_s: float = 7.0) -> list[Turn]:
    """Turns of a run of steps of about 2 s that grows slower, in which a busy or an idle step is followed by another.

    Something that is on makes steps longer by the share `effect`, also for `lingers_s` after it is switched off.
    """
    chance, now_s, wave = random.Random(seed), 0.0, 0.0
    on, off_since = False, -math.inf

    def switch(is_on: bool) -> None:
        nonlocal on, off_since
        if on and not is_on:
            off_since = now_s
        on = is_on

    turns = Turns(switch, lambda: {"trainer": now_s / 2}, num_pairs=20, num_steps=10, settle_s=settle_s, seed=seed)
    while not turns.is_over:
        wave = 0.7 * wave + chance.gauss(0.0, 0.1)
        is_dearer = on or now_s - off_since < lingers_s
        now_s += 2.0 * (1 + now_s / 2000) * math.exp(wave) * (1 + effect * is_dearer)
        turns.add_step(now_s)
    return turns.measured


def cost(turns: list[Turn]) -> Estimate:
    """The share by which steps are longer."""
    return compare(turns, lambda turn: turn.step_s, is_relative=True)


@pytest.mark.parametrize("effect", [0.0, 0.1])
def test_an_estimate_is_as_far_off_as_it_says(effect: float) -> None:
    """In 19 of 20 runs within two standard errors, and not on one side."""
    found = [cost(turns_of(seed, effect=effect)) for seed in range(50)]
    off = [(each.mean - effect) / each.error for each in found]
    assert sum(abs(each) <= 2.1 for each in off) >= 45
    assert abs(statistics.mean(off)) < 0.4


def test_what_a_switch_leaves_behind_is_not_measured() -> None:
    """Otherwise steps that are off pay for those that were on."""
    hasty, patient = (
        statistics.mean(cost(turns_of(seed, effect=0.2, settle_s=settle_s)).mean for seed in range(20))
        for settle_s in (0.0, 7.0)
    )
    assert hasty < 0.185
    assert patient == pytest.approx(0.2, abs=0.012)


def test_a_pair_has_a_turn_on_and_one_off_in_an_order_of_chance() -> None:
    """Neither is always the later one."""
    states = [turn.is_on for turn in turns_of(3, effect=0.0)]
    pairs = list(zip(states[::2], states[1::2], strict=True))
    assert len(pairs) == 20
    assert {*pairs} == {(True, False), (False, True)}


def test_a_turn_has_the_mean_of_its_steps() -> None:
    """In seconds and processor time, by kind; what is used outside of it does not count."""
    used, switched_to = {"trainer": 0.0}, list[bool]()
    turns = Turns(switched_to.append, lambda: dict(used), num_pairs=1, num_steps=2, settle_s=5.0)
    for ended_s, trainer in ((0, 1), (3, 2), (6, 10), (8, 13), (14, 16), (15, 50), (18, 60), (19, 62), (20, 63)):
        used["trainer"] = float(trainer)
        assert not turns.is_over
        turns.add_step(float(ended_s))
    used |= {"trainer": 65.0, "worker": 4.0}  # the worker came later
    turns.add_step(24.0)
    assert turns.is_over
    assert switched_to in ([True, False], [False, True])
    assert [(turn.step_s, turn.core_s) for turn in turns.measured] == [
        (4.0, {"trainer": 3.0}),
        (2.5, {"trainer": 1.5, "worker": 2.0}),
    ]
    assert turns.measured[1].total_core_s == 3.5


def test_differences_are_those_of_pairs() -> None:
    """By hand: 0.2 and 0.4 more, of 1 and 3 s: 0.3 ± 0.1 s, or 15% ± 5%."""
    turns = [
        Turn(is_on=is_on, step_s=step_s, core_s={})
        for is_on, step_s in ((True, 1.2), (False, 1.0), (False, 3.0), (True, 3.4))
    ]
    found = compare(turns, lambda turn: turn.step_s, is_relative=False)
    assert (found.mean, found.error) == pytest.approx((0.3, 0.1))
    share = compare(turns, lambda turn: turn.step_s, is_relative=True)
    assert (share.mean, share.error) == pytest.approx((0.15, 0.05))


def test_what_a_control_explains_is_no_difference() -> None:
    """By hand: differences of 1.3, -0.7 and 0.3 follow twice the scheduler's 0.5, -0.5 and 0, and 0.3 are left."""
    turns = [
        Turn(is_on=is_on, step_s=1.0, core_s={"trainer": trainer, "scheduler": scheduler})
        for is_on, trainer, scheduler in (
            *((True, 3.3, 1.5), (False, 2.0, 1.0)),
            *((False, 3.0, 1.5), (True, 2.3, 1.0)),
            *((True, 2.3, 1.0), (False, 2.0, 1.0)),
        )
    ]

    def trainer(turn: Turn) -> float:
        return turn.core_s["trainer"]

    found = compare(turns, trainer, is_relative=False, control=lambda turn: turn.core_s["scheduler"])
    assert (found.mean, found.error, found.num) == pytest.approx((0.3, 0.0, 3), abs=1e-9)
    assert compare(turns, trainer, is_relative=False).error > 0.5


def test_an_estimate_with_a_control_is_as_far_off_as_it_says() -> None:
    """In 19 of 20 runs within two standard errors, which are a fraction of those without it."""
    off, errors = [], []
    for seed in range(50):
        chance, turns = random.Random(seed), list[Turn]()
        for is_on in (True, False) * 20:
            slow = chance.uniform(0.8, 1.3)
            seconds = slow * chance.gauss(1.0, 0.02)
            core_s = {"trainer": 1.5 * seconds + 0.02 * is_on, "scheduler": 1.2 * slow}
            turns.append(Turn(is_on=is_on, step_s=seconds, core_s=core_s))

        def trainer(turn: Turn) -> float:
            return turn.core_s["trainer"]

        found = compare(turns, trainer, is_relative=False, control=lambda turn: turn.core_s["scheduler"])
        off.append((found.mean - 0.02) / found.error)
        errors.append(found.error / compare(turns, trainer, is_relative=False).error)
    assert sum(abs(each) <= 2.1 for each in off) >= 45
    assert abs(statistics.mean(off)) < 0.4
    assert max(errors) < 0.3


def test_what_cannot_be_told_is_not_told() -> None:
    """A bar within two and a half standard errors, and any bar by a few pairs."""
    found = Estimate(mean=0.15, error=0.05, num=10)
    assert [found.is_at_most(bar) for bar in (0.02, 0.04, 0.15, 0.26, 0.28)] == [False, None, None, None, True]
    few = Estimate(mean=-0.4, error=0.08, num=9)
    assert few.is_at_most(0.01) is None


@pytest.fixture
def switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Switch]:
    """A switch for spans and episodes, which are as before after the test."""
    for owner, name in (
        *((spans, "record"), (TrainingLoop, "_keep_episodes"), (EpisodeLog, "keep_left_out")),
        (specs, "_service_spec"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    with closing(Switch(tmp_path / "switch")) as switch:
        yield switch
    spans.close_buffer()


def test_spans_are_kept_while_it_is_on(switch: Switch, tmp_path: Path) -> None:
    """Whoever switches it, and whichever way they are recorded."""
    buffer = spans.open_buffer("worker-0")
    switched.switch_spans(switch)
    with closing(Switch(tmp_path / "switch")) as elsewhere:
        for is_on, expected in ((False, 0), (True, 2), (False, 2), (True, 4)):
            elsewhere.set(is_on)
            spans.record("turn", time.monotonic(), turn=0)
            with spans.recorded("tool", turn=0):
                pass
            assert len(buffer) == expected


def test_groups_are_kept_while_it_is_on(switch: Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed for those of other steps."""
    kept: list[Any] = []
    monkeypatch.setattr(EpisodeLog, "keep_left_out", lambda _, *about: kept.append(about))
    switched.switch_episodes(switch)
    log: Any = SimpleNamespace(keep_trained=lambda *about: kept.append(about))
    loop: Any = SimpleNamespace(episodes=log, backend=SimpleNamespace(step_tokens=lambda: kept.append("tokens")))
    for is_on in (False, True, False):
        switch.set(is_on)
        TrainingLoop._keep_episodes(loop, 1, 1, [])
        EpisodeLog.keep_left_out(log, "stale", "old", log)
    assert kept == ["tokens", (1, 1, [], None), ("stale", "old", log)]


def test_services_of_a_run_have_its_switch(switch: Switch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The launcher starts them by the same module, with the same file."""
    command = ["python", "-P", "-m", "services.cli", "serve", "worker"]
    spec = ProcessSpec(name="worker-0", service="worker", command=command, environment={}, phase=StopPhase.WORK)
    monkeypatch.setattr(specs, "_service_spec", lambda *_: spec)
    switched._start_switched(tmp_path / "switch")
    nothing: Any = None
    made = specs._service_spec(nothing, nothing, nothing, nothing)
    assert made.command == ["python", "-P", "-m", switched.MODULE, str(tmp_path / "switch"), "serve", "worker"]
