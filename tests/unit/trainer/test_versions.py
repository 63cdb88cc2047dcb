"""Which policy version a trainer starts with: no number ever stands for two sets of weights."""

import pytest

from penstock.errors import CorruptMessageError
from penstock.records.published_version import read_published_version, write_published_version
from penstock.v1.trainer_pb2 import PublishedVersion
from services.trainer.admission.gate import Gate
from services.trainer.versions import first_version


def first(
    *, checkpoint: int | None, published: int = 0, claimed: int = 0, newest_held: int = 0, max_staleness: int = 0
) -> int:
    """The first version, with a bound of 0 if none is given."""
    return first_version(
        checkpoint=checkpoint,
        published=published,
        claimed=claimed,
        newest_held=newest_held,
        max_staleness=max_staleness,
    )


def test_fresh_run_publishes_the_next_version() -> None:
    """Also on a NATS server that has seen another run of that name."""
    assert first(checkpoint=None) == 1
    assert first(checkpoint=None, max_staleness=4) == 1
    assert first(checkpoint=None, published=41, claimed=41) == 42


def test_orderly_stop_keeps_the_number_of_the_same_weights() -> None:
    """The checkpoint holds what was published last, and nothing was begun since."""
    assert first(checkpoint=7, published=7, claimed=7, newest_held=7, max_staleness=3) == 7


def test_crash_after_the_checkpoint_takes_a_new_number() -> None:
    """Lost steps were published, or a push had begun and some replica may hold its weights."""
    assert first(checkpoint=7, published=9, claimed=9, newest_held=9) == 10
    assert first(checkpoint=7, published=7, claimed=8) == 9


def test_forgetful_server_is_not_believed() -> None:
    """NATS came back empty, but replicas live that hold what it forgot."""
    assert first(checkpoint=7) == 8
    assert first(checkpoint=7, newest_held=12) == 13
    assert first(checkpoint=None, newest_held=12) == 13


@pytest.mark.parametrize("max_staleness", range(4))
def test_after_a_crash_everything_sampled_before_is_stale(max_staleness: int) -> None:
    """Nine updates of another history may lie between the checkpoint and the newest groups: none counts as fresh."""
    gate = Gate(max_staleness=max_staleness, groups_per_step=1)
    version = first(checkpoint=11, published=20, claimed=20, newest_held=20, max_staleness=max_staleness)
    for sampled in range(1, 21):
        assert gate.is_stale(oldest_version=sampled, newest_version=sampled, version=version)


def test_a_published_version_is_read_as_it_was_written() -> None:
    """Unknown fields of a later Penstock are ignored."""
    published = PublishedVersion(policy_version=7, min_policy_version=5, run_id="r", step=6, trainer_epoch="a")
    value = write_published_version(published)
    assert read_published_version(value) == published
    assert read_published_version(value[:-1] + b', "later": 1}') == published


@pytest.mark.parametrize(
    "value",
    [b"", b"[]", b"\xff", b'{"version": 7}', b'{"policy_version": "7", "min_policy_version": "8"}'],
)
def test_what_is_no_published_version_is_refused(value: bytes) -> None:
    """Whatever somebody has put under the key, routers do not take a number from it."""
    with pytest.raises(CorruptMessageError, match="is not a published version"):
        read_published_version(value)
