"""Failed replicas are retried less and less often, and a retry that is interrupted too often must end."""

from services.trainer.weight_sync.failed_replicas import FailedReplicas
from services.trainer.weight_sync.push_calls import Member

ONE, OTHER = Member("engine-1", "h:1"), Member("engine-2", "h:2")


def test_each_failure_doubles_the_wait() -> None:
    """Up to 32 times the first; a success starts anew."""
    failed = FailedReplicas(5.0)
    assert [failed.add(ONE, now=0.0) for _ in range(7)] == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 160.0]
    failed.remove(ONE)
    assert ONE not in failed
    assert failed.add(ONE, now=0.0) == 5.0


def test_a_replica_is_due_when_its_wait_is_over() -> None:
    """Each by itself; a dead one is never due."""
    failed = FailedReplicas(5.0)
    failed.add(ONE, now=100.0)
    failed.add(OTHER, now=103.0)
    assert failed.due(now=104.9) == []
    assert failed.due(now=105.0) == [ONE]
    assert failed.due(now=108.0) == [ONE, OTHER]
    failed.keep_only({OTHER})
    assert failed.due(now=108.0) == [OTHER]


def test_two_interruptions_are_the_most() -> None:
    """Until a retry has ended, well or not."""
    failed = FailedReplicas()
    failed.add(ONE, now=0.0)
    for _ in range(2):
        assert failed.may_interrupt(ONE)
        failed.interrupted(ONE)
    assert not failed.may_interrupt(ONE)
    assert failed.may_interrupt(OTHER)
    failed.add(ONE, now=0.0)
    assert failed.may_interrupt(ONE)
