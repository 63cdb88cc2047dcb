"""The launcher keeps processes going and leaves none, however the run ends."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.launch.fake_run import NOTE, PARENT, SERVE, STUBBORN, FakeRun, assert_all_gone
from tests.support.processes import is_alive
from tests.support.waiting import HANG_S, wait_until

SAVES_LATE = (
    NOTE
    + """
def finish(*_):
    note("asked")
    while not os.path.exists("may-save"):
        time.sleep(0.02)
    note("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, finish)
note("up")
while True:
    time.sleep(0.05)  # no pause(): it would sleep on after a signal that came just before
"""
)
"""A trainer that is in the middle of a step when it is asked to stop."""


def test_end_of_the_trainer_is_the_end_of_the_run(fake_run: Callable[..., FakeRun]) -> None:
    """Exit 0 of the process that ends the run stops all others, and the launcher exits with 0."""
    trainer = NOTE + "while not os.path.exists('notes'): time.sleep(0.02)\nnote('trained')"
    run = fake_run(
        [
            {"name": "router", "program": SERVE},
            {"name": "trainer", "program": trainer, "phase": "WORK", "ends_run": True},
        ]
    )
    code, _, err = run.finish()
    assert (code, err) == (0, "")
    assert len(run.notes("stopped-router")) == 1
    assert_all_gone(run)


def test_user_error_of_a_process_is_the_run_s(fake_run: Callable[..., FakeRun]) -> None:
    """Exit code 2 is not answered by a restart: the launcher prints the error that the process wrote, and exits with 2.

    What it logged does not matter, even if it looks like an error."""
    program = (
        NOTE
        + """
note("up")
print("error: noise")
with open("reward.error.json", "w") as file:
    file.write('{"error": "SetupError", "message": "port 7 is in use"}')
sys.exit(2)
"""
    )
    run = fake_run([{"name": "router", "program": SERVE}, {"name": "reward", "program": program}])
    code, _, err = run.finish()
    assert (code, err) == (2, "error: port 7 is in use\n")
    assert len(run.notes("up")) <= 2
    assert_all_gone(run)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_all_in_order(fake_run: Callable[..., FakeRun], number: signal.Signals) -> None:
    """Work is stopped first, then what serves it, the bus last; children of children are gone as well."""
    run = fake_run(
        [
            {"name": "nats", "program": SERVE, "phase": "BUS"},
            {"name": "router", "program": SERVE},
            {"name": "rollout-0", "program": PARENT},
            {"name": "worker", "program": SERVE, "phase": "WORK"},
        ]
    )
    run.wait_for("up", 4)
    run.process.send_signal(number)
    code, _, _ = run.finish()
    assert code == 0
    order = [line.split()[0] for line in (run.folder / "notes").read_text().splitlines() if line.startswith("stopped")]
    assert order == ["stopped-worker", "stopped-router", "stopped-nats"]
    assert_all_gone(run)


def test_the_trainer_finishes_its_step_however_long_it_takes(fake_run: Callable[..., FakeRun]) -> None:
    """After the first signal it has no limit, and what it needs for the push stays up, restarted if it dies."""
    run = fake_run(
        [
            {"name": "rollout-0", "program": SERVE},
            {"name": "worker-0", "program": STUBBORN, "phase": "WORK"},
            {"name": "trainer", "program": SAVES_LATE, "phase": "WORK", "ends_run": True},
        ],
        kill_after_s=10.0,
    )
    run.wait_for("up", 3)
    engine = next(pid for pid in run.notes("up") if "rollout-0" in Path(f"/proc/{pid}/cmdline").read_text())
    run.process.send_signal(signal.SIGINT)
    run.wait_for("asked")
    assert run.process.stdout is not None
    assert any("worker-0 did not stop within 10 s; killed" in line for line in run.process.stdout)
    os.kill(engine, signal.SIGKILL)
    run.wait_for("up", 4)
    (run.folder / "may-save").touch()
    code, _, err = run.finish()
    assert (code, err) == (0, "")
    assert len(run.notes("saved")) == 1
    assert len(run.notes("stopped-rollout-0")) == 1
    assert_all_gone(run)


def failing_to_save(end: str) -> str:
    """A trainer whose last checkpoint fails: it ends by these lines."""
    return f"""{NOTE}
def finish(*_):
    note("asked")
    {end}
signal.signal(signal.SIGTERM, finish)
note("up")
while True:
    time.sleep(0.05)  # no pause(): it would sleep on after a signal that came just before
"""


DISK_FULL = failing_to_save("""
    with open("trainer.error.json", "w") as file:
        file.write('{"error": "DiskError", "message": "no space left in runs"}')
    sys.exit(2)
""")
KILLED = failing_to_save("print('saving'); sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)")


@pytest.mark.parametrize(
    ("program", "code", "how", "error"),
    [
        (DISK_FULL, 2, "exited with 2", "error: no space left in runs\n"),
        (KILLED, 0, "was killed by signal 9", ""),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_trainer_that_fails_after_the_signal_is_reported(
    fake_run: Callable[..., FakeRun], number: signal.Signals, program: str, code: int, how: str, error: str
) -> None:
    """Its steps since the last checkpoint are lost, so the run says how it ended and why. The exit code is that of a
    stop, unless a person must mend something."""
    run = fake_run(
        [
            {"name": "router", "program": SERVE},
            {"name": "trainer", "program": program, "phase": "WORK", "ends_run": True},
        ]
    )
    run.wait_for("up", 2)
    run.process.send_signal(number)
    ended, out, err = run.finish()
    assert ended == code
    assert f"trainer {how} after it was asked to stop; steps after its last checkpoint are lost" in out
    assert err == error
    assert ("no space left in runs" in out) == (code == 2)
    assert len(run.notes("stopped-router")) == 1
    assert_all_gone(run)


@pytest.mark.parametrize(
    "end", ["sys.exit(130)", "sys.exit(143)", "signal.signal(15, signal.SIG_DFL); os.kill(os.getpid(), 15)"]
)
def test_a_trainer_that_a_signal_ends_in_order_has_not_failed(fake_run: Callable[..., FakeRun], end: str) -> None:
    """Exit codes of a signal are those of an orderly end, also before the trainer has set its own handler."""
    run = fake_run([{"name": "trainer", "program": failing_to_save(end), "phase": "WORK", "ends_run": True}])
    run.wait_for("up")
    run.process.send_signal(signal.SIGINT)
    code, out, _ = run.finish()
    assert (code, "trainer" in out) == (0, False)
    assert_all_gone(run)


def test_the_first_failure_is_the_run_s(fake_run: Callable[..., FakeRun]) -> None:
    """A trainer that then fails to stop is reported, but the error is that of the process which failed first."""
    reward = f"""{NOTE}
while not os.path.exists("may-fail"):
    time.sleep(0.02)
with open("reward.error.json", "w") as file:
    file.write('{{"error": "ConfigError", "message": "no such profile"}}')
sys.exit(2)
"""
    run = fake_run(
        [
            {"name": "reward", "program": reward},
            {"name": "trainer", "program": DISK_FULL, "phase": "WORK", "ends_run": True},
        ]
    )
    run.wait_for("up")
    (run.folder / "may-fail").touch()
    code, out, err = run.finish()
    assert (code, err) == (2, "error: no such profile\n")
    assert "trainer exited with 2 after it was asked to stop" in out
    assert_all_gone(run)


def test_the_trainer_does_not_wait_for_ever_for_a_process_that_dies_again_and_again(
    fake_run: Callable[..., FakeRun],
) -> None:
    """After Ctrl-C it waits for an engine that cannot be kept: it has a limit then, and the failure is the run's."""
    trainer = NOTE + "signal.signal(signal.SIGTERM, lambda *_: note('asked'))\nnote('up')\nwhile True: time.sleep(0.05)"
    engine = (
        NOTE
        + """
note("up")
while not any(line.startswith("asked") for line in open("notes")):
    time.sleep(0.02)
sys.exit("the boiler is cold")
"""
    )
    run = fake_run(
        [
            {"name": "rollout-0", "program": engine},
            {"name": "trainer", "program": trainer, "phase": "WORK", "ends_run": True},
        ],
        max_restarts=2,
        failed_run_grace_s=0.5,
    )
    run.wait_for("up", 2)
    run.process.send_signal(signal.SIGINT)
    code, out, err = run.finish()
    assert code == 1
    assert err.startswith("error: rollout-0 exited with 1, death 3 in a row without a trained step")
    assert "trainer has 0.5 s to stop\ntrainer did not stop within 0.5 s; killed" in out
    assert_all_gone(run)


def test_a_run_that_nobody_watches_any_longer_ends_in_order(fake_run: Callable[..., FakeRun]) -> None:
    """The reader of its output ends: what dies is started again, what is stubborn is killed, and the trainer saves."""
    dying = NOTE + "note('worker')\nsys.exit(1)"
    run = fake_run(
        [
            {"name": "stubborn", "program": STUBBORN, "phase": "WORK"},
            {"name": "dying", "program": dying, "phase": "WORK"},
            {"name": "trainer", "program": SAVES_LATE, "phase": "WORK", "ends_run": True},
        ],
        kill_after_s=0.5,
        max_restarts=1000,
    )
    run.wait_for("up", 2)
    assert run.process.stdout is not None
    run.process.stdout.close()
    run.wait_for("worker", len(run.notes("worker")) + 3)
    run.process.send_signal(signal.SIGINT)
    run.wait_for("asked")
    (stubborn,) = [pid for pid in run.notes("up") if pid not in run.notes("asked")]
    wait_until(lambda: not is_alive(stubborn))
    (run.folder / "may-save").touch()
    assert run.process.wait(HANG_S) == 0
    assert len(run.notes("saved")) == 1
    assert run.process.stderr is not None
    assert run.process.stderr.read() == ""
    assert_all_gone(run)
