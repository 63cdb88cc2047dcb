"""A real Alertmanager with the configuration of the compose stack, and the person whom it tells of alerts."""

import asyncio
import json
import re
import shlex
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from penstock.runtime.ports import free_ports
from tests.observability.servers import DEPLOY, running

CONFIGURATION = DEPLOY / "prometheus" / "alertmanager.yml"


@dataclass(frozen=True, slots=True)
class Alertmanager:
    """A running server."""

    address: str
    """host:port."""
    messages: list[dict[str, Any]]
    """What its receiver was sent, the oldest first."""

    def told(self, status: str) -> set[str]:
        """Return the names of the alerts that the receiver was told of as `status`, firing or resolved."""
        alerts = [alert for message in tuple(self.messages) for alert in message["alerts"]]
        return {alert["labels"]["alertname"] for alert in alerts if alert["status"] == status}

    async def until_told(self, names: set[str], status: str, *, timeout_s: float) -> None:
        """Wait until the receiver was told of each of these alerts."""
        ends_at = time.monotonic() + timeout_s
        while missing := names - self.told(status):
            assert time.monotonic() < ends_at, f"{sorted(missing)}: nobody was told within {timeout_s} s of {status}"
            await asyncio.sleep(0.2)


def configuration(hook: str) -> dict[str, Any]:
    """Return that of the stack, with the webhook that its comment shows, at `hook`, and without its waits."""
    text = CONFIGURATION.read_text()
    config: dict[str, Any] = yaml.safe_load(text)
    shown = re.search(r"^#   (webhook_configs: .*)$", text, re.MULTILINE)
    assert shown is not None
    integration = yaml.safe_load(shown[1].replace("https://example.com/hook", hook))
    assert integration == {"webhook_configs": [{"url": hook}]}
    (receiver,) = config["receivers"]
    receiver |= integration
    config["route"] |= {"group_wait": "1s", "group_interval": "1s"}
    return config


@contextmanager
def notifying() -> Iterator[Alertmanager]:
    """Run an Alertmanager as the compose stack does, whose receiver is here."""
    with tempfile.TemporaryDirectory(prefix="alertmanager-") as name, _receiving() as (hook, messages):
        folder = Path(name)
        (folder / "alertmanager.yml").write_text(json.dumps(configuration(hook)))
        [port] = free_ports(1)
        address = f"127.0.0.1:{port}"
        compose = yaml.safe_load((DEPLOY / "docker-compose.observability.yml").read_text())
        arguments = compose["services"]["alertmanager"]["command"]
        for inside in ("/etc/prometheus/alertmanager.yml", "/tmp/alertmanager"):
            assert inside in arguments
            arguments = arguments.replace(inside, str(folder / Path(inside).name))
        command = ["prometheus-alertmanager", *shlex.split(arguments), f"--web.listen-address={address}"]
        with running(command, url=f"http://{address}", log=folder / "log"):
            yield Alertmanager(address, messages)


@contextmanager
def _receiving() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve a webhook; yield its address and what it was sent."""
    messages: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook", messages
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
