"""A pytest plugin: no test leaves a task, process, thread, connection, open file or temporary file behind.

What a test adds to this process, and does not give back within `_GRACE_S`, fails it. What a fixture of a wider scope
adds while it is set up belongs to that fixture, and so do connections of its servers. What code adds inside
`for_the_session` may stay to the end. A test with the marker `leaves_behind(reason, *kinds)` may leave those kinds:
task, thread, process, descriptor, file.
"""

import asyncio
import contextlib
import gc
import inspect
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Generator, Hashable, Iterator, Set
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from nats.aio.client import Client

_GRACE_S = 30.0
_COLLECT_AFTER_S = 2.5
_NUM_LOOKS = 200
"""Looks after the garbage was collected, at least: this process may stand still for as long as the grace."""
_POOLS = ("asyncio_", "ThreadPoolExecutor-", "AnyIO worker thread", "pytest_timeout")
"""How the names of threads begin that serve any number of tests."""
_CACHES = ("torchinductor_", ".hypothesis")
"""How the names of folders begin that libraries make once: torch when its compiler is imported, hypothesis in a fresh
clone, of what it has found."""
_OF_CONNECTION = ("_read_loop", "_ping_interval", "_flusher")
"""A NATS client's coroutines that end with its connection."""
_FORKER = "services.rollout.testing.engine_forker"
"""What it forks is a test's as if the test had started it itself."""
_LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp."""
_ROOT = Path(__file__).parents[2]

Holdings = dict[Hashable, str]
"""What identifies something that this process has, and words for a person."""

_loop: asyncio.AbstractEventLoop | None = None
_of_session: set[Hashable] = set()


def pytest_configure(config: pytest.Config) -> None:
    """Have temporary files in a folder of this process's own, so that those of others are not taken for a test's."""
    config.addinivalue_line("markers", "leaves_behind(reason, *kinds): what the test leaves of these kinds is no fault")
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # for tmp_path, which outlives this process
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="penstock-test-")
    # At exit, and after multiprocessing has removed its folder in there (which it does with priority -100).
    multiprocessing.util.Finalize(None, shutil.rmtree, (tempfile.tempdir, True), exitpriority=-200)


@contextlib.contextmanager
def for_the_session() -> Iterator[None]:
    """Whatever the body of this context starts may stay until the end."""
    before = _holdings()
    try:
        yield
    finally:
        _of_session.update(_holdings().keys() - before.keys())


@pytest.fixture(scope="session", autouse=True)
async def _session_loop() -> None:
    global _loop
    _loop = asyncio.get_running_loop()
    with for_the_session():
        grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]  # or else each test would start and end its threads
        multiprocessing.resource_tracker.ensure_running()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
    """What comes up with a wider fixture is not its first test's."""
    if fixturedef.scope == "function":
        return (yield)
    with for_the_session():
        return (yield)


@pytest.fixture(autouse=True)
async def nothing_left_behind(request: pytest.FixtureRequest, _session_loop: None) -> AsyncIterator[None]:
    """Fail a test that leaves something behind. Set up before the test's other fixtures, it looks after they ended."""
    before = _holdings().keys()
    yield
    may_stay = set[str]()
    if (marker := request.node.get_closest_marker("leaves_behind")) is not None:
        _reason, *kinds = marker.args
        assert kinds, "leaves_behind(reason, *kinds) names no kind"
        may_stay.update(kinds)
    ended_at, num_looks = time.monotonic(), 0
    while left := _left(before, may_stay):
        waited_s = time.monotonic() - ended_at
        if waited_s > _GRACE_S and num_looks > _NUM_LOOKS:
            pytest.fail("left behind: " + "; ".join(left), pytrace=False)
        if waited_s > _COLLECT_AFTER_S:
            if num_looks == 0:
                gc.collect()  # what only a cycle of references keeps open is not left behind
            num_looks += 1
        await asyncio.sleep(0.01)


def _left(before: Set[Hashable], may_stay: Set[str]) -> list[str]:
    known = {*before, *_of_session, asyncio.current_task()}
    now = {key: words for key, words in _holdings().items() if _kind_of(key) not in may_stay}
    left = {key: words for key, words in now.items() if words and key not in known}
    if left:
        connections = _to_servers_among(known)
        left = {key: words for key, words in left.items() if key not in connections}
    return list(left.values())


def _kind_of(key: Hashable) -> str:
    if isinstance(key, tuple):
        return str(key[0])
    return "task" if isinstance(key, asyncio.Task) else "thread"


def _to_servers_among(known: Set[Hashable]) -> set[Hashable]:
    """This process's connections from and to servers that it knew before, also those of its child processes.

    Servers keep what they accept as long as the client likes, and clients of wider fixtures connect when first used.
    """
    own = {target: ("descriptor", number, target) for number, target in _descriptors()}
    of_servers = {target for target, key in own.items() if key in known}
    for key in known:
        if isinstance(key, tuple) and key[0] == "process":
            with contextlib.suppress(OSError):
                of_servers.update(target for _, target in _descriptors(str(key[1])))
    ports, connections = set[str](), list[tuple[str, str, Hashable]]()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, remote, state, *_ = row = line.split()
            socket = f"socket:[{row[9]}]"
            if state == _LISTEN and socket in of_servers:
                ports.add(local.rpartition(":")[2])
            elif socket in own:
                connections.append((local.rpartition(":")[2], remote.rpartition(":")[2], own[socket]))
    return {key for local, remote, key in connections if local in ports or remote in ports}


def _holdings() -> Holdings:
    found: Holdings = {}
    for task in asyncio.all_tasks(_loop) if _loop is not None else ():
        if not type(task.get_coro()).__module__.startswith("_cython"):  # gRPC's own; its sockets show what is left open
            client = _nats_client(task)
            found[task if client is None else ("task", client)] = f"task {task.get_name()} of {task.get_coro()!r}"
    for thread in threading.enumerate():
        if not thread.name.startswith(_POOLS):
            found[thread] = f"thread {thread.name}"
    for pid in _children("self"):
        found["process", pid] = _command(pid)
        if _FORKER in found["process", pid]:
            found.update({("process", forked): _command(forked) for forked in _children(str(pid))})
    for number, target in _descriptors():
        found["descriptor", number, target] = f"descriptor {number} of {target}"
    for folder in (Path(tempfile.gettempdir()), _ROOT):
        for path in folder.iterdir():
            if not path.name.startswith(_CACHES):
                found["file", path] = f"file {path}"
    return found


def _nats_client(task: asyncio.Task[Any]) -> Client | None:
    """Whose task it is. A client that a busy test has held up reconnects, and then has other tasks than before."""
    coroutine = task.get_coro()
    if not inspect.iscoroutine(coroutine) or coroutine.__name__ not in _OF_CONNECTION:
        return None
    owner = coroutine.cr_frame.f_locals.get("self") if coroutine.cr_frame is not None else None
    return owner if isinstance(owner, Client) else None


def _children(process: str) -> Iterator[int]:
    with contextlib.suppress(FileNotFoundError):  # it has ended
        for thread in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):
                yield from map(int, (thread / "children").read_text().split())


def _command(pid: int) -> str:
    """Empty for a process that has ended, whether or not this one has heard of it."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
    except OSError:
        return ""
    return f"process {pid}: {command}" if command else ""


def _descriptors(process: str = "self") -> Iterator[tuple[int, str]]:
    """Connections, pipes and files. The rest belongs to event loops and pollers, which live as long as the process."""
    for name in os.listdir(f"/proc/{process}/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/{process}/fd/{name}")
            if target.startswith(("socket:", "pipe:", "/")) and not target.startswith(("/dev/", "/proc/")):
                yield int(name), target
