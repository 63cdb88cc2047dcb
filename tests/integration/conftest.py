"""One real engine for all tests that can share it, and the policies that it is given.

torch is imported only where one of them is used.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.config import SecurityConfig
from tests.support.certificates import make_certificates

if TYPE_CHECKING:
    from services.rollout.testing.engine_process import EngineProcess
    from tests.support.engine.reference import Reference


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that kill an engine which others share come last in their module: each start of one costs ten seconds."""
    modules = {item.path: number for number, item in reversed(list(enumerate(items)))}
    items.sort(key=lambda item: (modules[item.path], item.get_closest_marker("kills_engine") is not None))


@pytest.fixture(scope="session")
def replica_forkserver() -> None:
    """The process that simulated replicas are forked from; it outlives the tests that use it."""
    from services.rollout.testing.simulated_replica import start_forkserver

    start_forkserver()


@pytest.fixture(scope="session")
async def engine_forker() -> AsyncIterator[None]:
    """The process that engines are forked from: most of an engine's start is its import of SGLang."""
    from services.rollout.testing.engine_process import forking_engines

    async with forking_engines():
        yield


@pytest.fixture(scope="session")
def reference(tiny_model_path: Path) -> Reference:
    """The policy of version 0."""
    from tests.support.engine.reference import Reference

    return Reference(tiny_model_path)


@pytest.fixture(scope="session")
async def engine(
    engine_forker: None, tiny_model_path: Path, nats_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineProcess]:
    """One engine for all tests; each leaves it READY."""
    from services.rollout.testing.engine_process import engine_process

    folder = tmp_path_factory.mktemp("engine")
    async with engine_process(
        tiny_model_path, nats_url, folder, max_running=32, context_length=1024, grace_s=2.0, is_measured=True
    ) as process:
        await process.replica()  # the connection lasts as long as the engine
        yield process


@pytest.fixture
async def current(request: pytest.FixtureRequest, engine: EngineProcess, reference: Reference) -> Reference:
    """A policy that the engine holds now: tests come in any order, so each one that looks at values pushes its own.

    It follows from the test's name: the same in every run, and another than an earlier test left in the caches.
    """
    from tests.support.engine.push import Push

    policy = reference.perturbed(seed=zlib.crc32(request.node.nodeid.encode()))
    await Push(engine, policy.weights, (await engine.replica()).policy_version + 1).complete()
    return policy


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> SecurityConfig:
    """An authority and a certificate, made as docs/operation/security.md says."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def other_certificates(tmp_path_factory: pytest.TempPathFactory) -> SecurityConfig:
    """Those of another authority."""
    return make_certificates(tmp_path_factory.mktemp("others"))
