"""What is imported for ever is not searched for garbage, neither then nor later."""

import subprocess
import sys

PROGRAM = """
import gc
from penstock.runtime.imports import kept_for_ever

gc.collect()
searched = []
gc.callbacks.append(lambda phase, info: searched.append(phase))
before = gc.get_freeze_count()
with kept_for_ever():
    kept = [[] for _ in range(100_000)]
assert searched == []
assert gc.get_freeze_count() - before >= 100_000
assert gc.isenabled()
try:
    with kept_for_ever():
        raise ModuleNotFoundError
except ModuleNotFoundError:
    assert gc.isenabled()
gc.disable()
before = gc.get_freeze_count()
with kept_for_ever():
    kept.append([])
assert not gc.isenabled()
assert gc.get_freeze_count() == before
"""


def test_nothing_is_searched_while_it_is_imported() -> None:
    """In a process of its own; who collects no garbage goes on without, and nothing of his is kept."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=200)
