"""`penstock serve nats` on the store of a run that has ended: nobody else touches the store meanwhile."""

import asyncio
import errno
import importlib
import os
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.bus.local_server import become_server, local_server, require_unserved_store
from penstock.config import BusConfig, load
from penstock.errors import ConfigError, SetupError
from penstock.runtime.ports import free_ports
from penstock.runtime.security import Security
from penstock.testing.freezing import frozen
from services.cli.app import main
from services.launch.launcher import launch
from services.launch.run_folder import RunFolder
from services.launch.serving import serving
from services.recipe import Recipe
from tests.support.launch.fake_ray import faking_ray


async def train(recipe: Recipe, folder: RunFolder) -> None:
    await launch(recipe, folder, asyncio.Event(), Security())


async def train_on_ray(recipe: Recipe, folder: RunFolder) -> None:
    cluster: Any = SimpleNamespace(own_address="127.0.0.1", hosts=[], has_gpus=False)
    with pytest.MonkeyPatch.context() as monkeypatch, faking_ray(monkeypatch):
        on_ray: Any = importlib.import_module("services.launch.on_ray.launch")
        await on_ray.launch(recipe, folder, asyncio.Event(), security=Security(), cluster=cluster)


async def serve(recipe: Recipe, folder: RunFolder) -> None:
    async with serving(recipe, folder, asyncio.Event(), Security(), print):
        pass


@pytest.mark.parametrize("use", [train, train_on_ray, serve])
async def test_a_run_whose_store_is_served_is_not_started(
    tmp_path: Path, use: Callable[[Recipe, RunFolder], Awaitable[None]]
) -> None:
    """Two servers would write to the same files. The addresses by which others use the server stay."""
    folder = RunFolder(tmp_path)
    recipe = load(Recipe, [])
    folder.write_config(recipe)
    folder.live_file.write_text("as it was")
    (port,) = free_ports(1)
    refused = pytest.raises(SetupError, match=rf"nats-server at 127\.0\.0\.1:{port} serves the store in {tmp_path}")
    async with local_server(folder.nats, port=port):
        with refused:
            await use(recipe, folder)
    assert folder.live_file.read_text() == "as it was"


async def test_a_run_whose_store_is_served_is_not_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once the server has ended it is, although another program listens on the server's port."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    with folder.locked():
        folder.write_config(load(Recipe, []))
    (port,) = free_ports(1)
    delete = ["runs", "delete", str(folder.path), "--yes"]
    async with local_server(folder.nats, port=port):
        assert await asyncio.to_thread(main, delete) == 2
    assert f"nats-server at 127.0.0.1:{port} serves the store in {folder.nats}" in capsys.readouterr().err

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 smtp.example.org\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", port):
        assert await asyncio.to_thread(main, delete) == 0
    assert not folder.path.exists()


async def test_a_store_that_is_served_gets_no_second_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any port; a try at a port that is taken does not hide the server from the next one."""
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda binary, arguments, environment: started.append(arguments))
    port, other = free_ports(2)

    def serve_nats() -> None:
        become_server(BusConfig(url=f"nats://127.0.0.1:{other}"), tmp_path, Security())

    async with local_server(tmp_path, port=port):
        with socket.create_server(("127.0.0.1", other)), pytest.raises(SetupError, match="choose another port"):
            await asyncio.to_thread(serve_nats)
        with pytest.raises(SetupError, match=rf"nats-server at 127\.0\.0\.1:{port} serves the store in {tmp_path}"):
            await asyncio.to_thread(serve_nats)
    assert started == []
    await asyncio.to_thread(serve_nats)
    assert len(started) == 1


def test_a_server_is_not_started_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration cannot be written; one line says what to do."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("penstock.bus.local_server.server_command", full)
    [port] = free_ports(1)
    with pytest.raises(SetupError, match=rf"{tmp_path}: .*No space left on device; .* start the server again"):
        become_server(BusConfig(url=f"nats://127.0.0.1:{port}"), tmp_path, Security())


def test_a_server_is_not_started_at_an_ipv6_address(tmp_path: Path) -> None:
    """It would not listen there, and another port, as its error used to advise, would not help."""
    with pytest.raises(ConfigError, match=r"bus.url = 'nats://\[::1\]:4222': .* IPv6 addresses are not supported"):
        become_server(BusConfig(url="nats://[::1]:4222"), tmp_path, Security())


async def test_the_server_of_another_store_on_the_port_is_no_obstacle(tmp_path: Path) -> None:
    """The system gives a port that is free again to the next run."""
    folder = RunFolder(tmp_path / "run")
    (port,) = free_ports(1)
    async with local_server(folder.nats, port=port):
        pass
    async with local_server(RunFolder(tmp_path / "other").nats, port=port):
        await require_unserved_store(folder.nats)


async def test_a_server_without_a_name_of_ours_counts_as_the_last_one(tmp_path: Path) -> None:
    """An earlier version of Penstock gave it none; its store is safe from a second server all the same."""
    folder = RunFolder(tmp_path)
    (port,) = free_ports(1)
    async with local_server(folder.nats, port=port):
        config = folder.nats / "nats.conf"
        config.write_text(re.sub("(?m)^server_name: .*\n", "", config.read_text()))
        with pytest.raises(SetupError, match=f"{port} serves the store"):
            await require_unserved_store(folder.nats)


async def test_a_server_that_stands_still_keeps_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system takes connections for it, and it may go on; so the error is the same for a program that never does."""
    monkeypatch.setattr("penstock.bus.local_server._GREETING_TIMEOUT_S", 0.5)
    folder = RunFolder(tmp_path)
    (port,) = free_ports(1)
    may_be_served = pytest.raises(SetupError, match=rf"127\.0\.0\.1:{port} takes connections and says nothing.*stop")
    async with local_server(folder.nats, port=port):
        with frozen(int((folder.nats / "nats.pid").read_text())), may_be_served:
            await require_unserved_store(folder.nats)
    await require_unserved_store(folder.nats)


async def test_a_server_that_is_ending_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a launcher that was just killed; the run may go on at once."""
    answers = [{"server_name": "its"}, {"server_name": "its"}, None]

    async def read_greeting(host: str, port: int, *, timeout_s: float) -> dict[str, object] | None:
        return answers.pop(0)

    folder = RunFolder(tmp_path)
    folder.nats.mkdir()
    (folder.nats / "nats.conf").write_text('listen: "127.0.0.1:1"\nserver_name: "its"\n')
    monkeypatch.setattr("penstock.bus.local_server.read_greeting", read_greeting)
    await require_unserved_store(folder.nats)
    assert answers == []
