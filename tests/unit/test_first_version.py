"""Which policy version a trainer starts with: no number ever stands for two sets of weights."""

from pathlib import Path

from services.trainer.main import _first_version
from services.trainer.policy.checkpoint import Checkpoint


def checkpoint(version: int) -> Checkpoint:
    """One that holds the weights published as `version`."""
    return Checkpoint(step=5, path=Path("nowhere"), state={"version": version})


def test_fresh_run_publishes_the_next_version() -> None:
    """Also on a NATS server that has seen another run of that name."""
    assert _first_version(0, None) == 1
    assert _first_version(41, None) == 42


def test_orderly_stop_keeps_the_number_of_the_same_weights() -> None:
    """The checkpoint holds what was published last."""
    assert _first_version(7, checkpoint(7)) == 7


def test_lost_steps_and_lost_servers_never_reuse_a_number() -> None:
    """A crash after the checkpoint, or a NATS server that has forgotten."""
    assert _first_version(9, checkpoint(7)) == 10
    assert _first_version(0, checkpoint(7)) == 8
