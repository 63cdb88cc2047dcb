"""The time that environments have for their `close`."""

from services.launch.launcher import KILL_MARGIN_S
from services.rollout.worker.environments.hosting import processes, remote, served_episodes
from services.rollout.worker.episodes import beginning


def test_whoever_waits_for_a_close_waits_longer_than_what_it_waits_for() -> None:
    """A sample waits for a server, which waits for a process; and a launcher waits for the worker of all of them. Who
    gives up first kills an environment that still has time."""
    assert (
        processes._CLOSE_TIMEOUT_S
        < served_episodes._CLOSE_TIMEOUT_S
        < remote._CLOSE_TIMEOUT_S
        < beginning._CLOSE_TIMEOUT_S
        < KILL_MARGIN_S
    )
