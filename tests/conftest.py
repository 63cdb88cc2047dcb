"""What tests share: a real nats-server for the whole session, and a run of its own for each test."""

import functools
import gc
import os
import re
import uuid
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import structlog
import tqdm
from xdist.scheduler import LoadScopeScheduling

from penstock.bus.connection import Bus
from penstock.bus.local_server import local_server
from penstock.config import BusConfig
from penstock.runtime.security import VARIABLES
from penstock.testing.local_bus import temporary_run
from tests.support import leftovers

ROOT = Path(__file__).resolve().parents[1]
_TOGETHER = ("tests/unit/backend/ranks/", "tests/integration/openai_frontend/")
"""Folders whose tests share processes: ranks, and routers with their engines."""

# Before torch is imported: two OpenMP threads that share a busy core wait for each other far longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

for _variable in VARIABLES:  # of whoever runs the tests: servers under test ask for what the test says
    os.environ.pop(_variable, None)

# The first progress bar of a process would start a thread that no one ends.
tqdm.tqdm.monitor_interval = 0

# A slow or busy machine is no fault: no example of a property has a time limit of its own.
hypothesis.settings.register_profile("untimed", parent=hypothesis.settings.default, deadline=None)
hypothesis.settings.load_profile("untimed")

# structlog's own tracebacks take seconds, within which a test's deadlines pass.
_plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[*structlog.get_config()["processors"][:-1], _plain])


def _configure_uncached(**settings: Any) -> None:
    """As structlog's own; but a logger that a command under test has used stays open to later tests' settings."""
    _configure(**settings | {"cache_logger_on_first_use": False})


_configure, structlog.configure = structlog.configure, _configure_uncached


class Together(LoadScopeScheduling):
    """Workers share the tests file by file, so that a module's fixtures are made once.

    All that start engines are one worker's: two of those at a time would starve each other. Folders that share other
    processes are one worker's too: they start them once.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if _starts_engines(ROOT / file):
            return "engines"
        return next((folder for folder in _TOGETHER if file.startswith(folder)), file)


def pytest_configure(config: pytest.Config) -> None:
    """Check for every test that it leaves nothing behind."""
    config.pluginmanager.register(leftovers)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together:
    """For `make test`; plain `pytest` has no workers."""
    return Together(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Do without garbage collection while test modules are imported; what they made stays for ever."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first: at the end, no worker plays a long file while the others have nothing to do."""
    items.sort(key=lambda item: not (item.nodeid.startswith(_TOGETHER) or _is_slow(item.path)))
    items.sort(key=lambda item: not _starts_engines(item.path))


@functools.cache
def _starts_engines(file: Path) -> bool:
    return re.search(r"\bmark\.(engine|e2e)\b", file.read_text()) is not None


@functools.cache
def _is_slow(file: Path) -> bool:
    return re.search(r"\bmark\.slow\b", file.read_text()) is not None


@pytest.fixture(autouse=True)
def own_log_settings() -> Iterator[None]:
    """Commands that a test calls in this process configure the log; the next test has it as it was."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
    structlog.contextvars.clear_contextvars()


@pytest.fixture(scope="session")
async def nats_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """URL of a nats-server with JetStream, on any free port."""
    folder: Path = tmp_path_factory.mktemp("nats")
    async with local_server(folder) as url:
        yield url


@pytest.fixture
def run_name() -> str:
    """A run name that no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def bus_config(nats_url: str) -> BusConfig:
    """The session's server, with leases and waits that lapse within seconds of a kill."""
    return BusConfig(url=nats_url, lease_ttl_s=3.0, ack_wait_s=1.0)


@pytest.fixture
async def bus(bus_config: BusConfig, run_name: str) -> AsyncIterator[Bus]:
    """A connection whose run has its streams; they and the buckets are gone afterwards."""
    async with temporary_run(bus_config, run_name) as connection:
        yield connection


@pytest.fixture
async def steady_bus(bus_config: BusConfig, run_name: str) -> AsyncIterator[Bus]:
    """As `bus`, with leases that do not lapse while this process, which holds all of them, is busy."""
    async with temporary_run(bus_config.model_copy(update={"lease_ttl_s": 10.0}), run_name) as connection:
        yield connection


@pytest.fixture(scope="session")
def rendezvous() -> None:
    """From its first rendezvous to its end, torch keeps a pipe open in this process."""
    from services.trainer.weight_sync.process_group import WeightProcessGroup

    WeightProcessGroup.listen(host="127.0.0.1", name="first", world_size=1, backend="gloo").close()


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a randomly initialised Qwen3-VL of a million parameters, with tokenizer, processor and template."""
    from models.tiny_qwen3_vl import build_config, build_model, build_processor, build_tokenizer, save_model

    out = tmp_path_factory.mktemp("models") / "tiny-qwen3-vl"
    tokenizer = build_tokenizer()
    save_model(build_model(build_config(tokenizer), seed=0), build_processor(tokenizer), out)
    return out
