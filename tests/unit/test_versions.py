"""Which policy version a trainer starts with: no number ever stands for two sets of weights."""

from services.trainer.versions import first_version


def test_fresh_run_publishes_the_next_version() -> None:
    """Also on a NATS server that has seen another run of that name."""
    assert first_version(checkpoint=None, published=0, reserved=0, newest_held=0) == 1
    assert first_version(checkpoint=None, published=41, reserved=41, newest_held=0) == 42


def test_orderly_stop_keeps_the_number_of_the_same_weights() -> None:
    """The checkpoint holds what was published last, and nothing was begun since."""
    assert first_version(checkpoint=7, published=7, reserved=7, newest_held=7) == 7


def test_crash_after_the_checkpoint_takes_a_new_number() -> None:
    """Lost steps were published, or a push had begun and some replica may hold its weights."""
    assert first_version(checkpoint=7, published=9, reserved=9, newest_held=9) == 10
    assert first_version(checkpoint=7, published=7, reserved=8, newest_held=0) == 9


def test_forgetful_server_is_not_believed() -> None:
    """NATS came back empty, but replicas live that hold what it forgot."""
    assert first_version(checkpoint=7, published=0, reserved=0, newest_held=0) == 8
    assert first_version(checkpoint=7, published=0, reserved=0, newest_held=12) == 13
    assert first_version(checkpoint=None, published=0, reserved=0, newest_held=12) == 13
