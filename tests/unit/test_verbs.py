"""The stand-in for libibverbs: a library that the loader takes, with functions that say that there is no device."""

import ctypes
import importlib.util
import platform
import subprocess
import sys

import pytest

from penstock.errors import SetupError
from services.rollout.engine import verbs

pytestmark = pytest.mark.skipif(platform.machine() not in verbs._MACHINES, reason="no stand-in for this machine")


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is not installed, whatever this machine has."""
    load = ctypes.CDLL

    def find(name: str) -> ctypes.CDLL:
        if name == verbs.LIBRARY:
            raise OSError(f"{name}: cannot open shared object file")
        return load(name)

    monkeypatch.setattr(ctypes, "CDLL", find)


@pytest.mark.usefixtures("missing")
def test_the_stand_in_has_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function that mooncake refers to is there and returns 0."""
    loaded: list[ctypes.CDLL] = []
    monkeypatch.setattr(verbs, "_loaded", loaded)
    verbs.require_verbs(cuda=False)
    (library,) = loaded
    names = [verbs._full(name) for names in verbs._FUNCTIONS.values() for name in names.split()]
    assert "ibv_get_device_list" in names
    for name in names:
        assert getattr(library, name)(None) == 0, name


@pytest.mark.usefixtures("missing")
def test_an_engine_on_a_gpu_wants_the_real_library() -> None:
    """The error names the package."""
    with pytest.raises(SetupError, match="apt-get install libibverbs1"):
        verbs.require_verbs(cuda=True)


@pytest.mark.skipif(importlib.util.find_spec("mooncake") is None, reason="pip install 'penstock[disaggregation]'")
def test_mooncake_loads_with_it() -> None:
    """In a process of its own, whether libibverbs is installed or not: a library cannot be unloaded."""
    code = (
        "from services.rollout.engine import verbs\n"
        "verbs._load(verbs.stand_in({v: [verbs._full(n) for n in s.split()] for v, s in verbs._FUNCTIONS.items()},"
        " *verbs._MACHINES[__import__('platform').machine()]))\n"
        "import mooncake.engine\n"
        "print(sorted({line.split()[-1] for line in open('/proc/self/maps') if 'ibverbs' in line}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() != "[]"
