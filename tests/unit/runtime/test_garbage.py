"""Processes with many objects look for garbage seldom, and only among new ones."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from penstock.runtime.garbage import rare_collections


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    """What a test exempts counts again after it."""
    yield
    gc.unfreeze()


class _Ring:
    """An object that refers to itself, which only a collection deletes."""

    def __init__(self) -> None:
        self.own = self


def test_collections_are_rare_during_the_context_only() -> None:
    """A thirtieth as often, of the youngest objects and of all."""
    before = gc.get_threshold()
    with rare_collections():
        during = gc.get_threshold()
    assert during == (20_000, *before[1:])
    assert gc.get_threshold() == before


def test_what_is_garbage_before_does_not_stay_for_ever() -> None:
    """Exempt objects are never looked at again, so none of them may be garbage; what comes later still goes."""
    gone, kept = weakref.ref(_Ring()), _Ring()
    with rare_collections():
        assert gone() is None
        assert gc.get_freeze_count() > 0
        assert not any(each is kept for each in gc.get_objects())
        later = weakref.ref(_Ring())
        gc.collect()
        assert later() is None
