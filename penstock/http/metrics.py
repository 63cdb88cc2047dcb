"""Serves the process's metrics to Prometheus: a page for any application, and a server that has nothing else.

A process that knows its run's folder also writes its address beside that, in Prometheus' format for file-based service
discovery: prometheus/<run folder's name>.<process>.json, removed at an orderly end. A killed process leaves it, so
Prometheus sees it as down, until its successor replaces it.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path

import structlog
from fastapi import FastAPI, Response

from penstock.config import NetworkConfig, RunConfig
from penstock.http.app import make_app
from penstock.http.server import HttpServer
from penstock.runtime.files import write_atomically
from penstock.runtime.security import Security
from penstock.telemetry import metrics
from penstock.telemetry.serving import targets_folder

log = structlog.get_logger()

_GRACE_S = 1.0


def add_metrics_page(app: FastAPI) -> None:
    """Serve GET /metrics."""

    @app.get(
        "/metrics",
        tags=["operation"],
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def get_metrics() -> Response:
        """Return counters, gauges and histograms in Prometheus' text format."""
        return Response(await metrics.page(), headers={"Content-Type": metrics.CONTENT_TYPE})


@asynccontextmanager
async def serving(port: int, run: RunConfig, network: NetworkConfig, security: Security) -> AsyncIterator[HttpServer]:
    """Serve nothing but the metrics on `port` during the context; 0 takes any free port.

    Raises:
        SetupError: the port is in use.
    """
    app = make_app(title="Penstock metrics", description="What this process measures.", version=version("penstock"))
    add_metrics_page(app)
    server = HttpServer(app, host=network.host, port=port, key="metrics.port", security=security)
    await server.start()
    file = await asyncio.to_thread(_announce, server, run, network)
    try:
        yield server
    finally:
        if file is not None:
            file.unlink(missing_ok=True)
        await server.drain(_GRACE_S)


def _announce(server: HttpServer, run: RunConfig, network: NetworkConfig) -> Path | None:
    """Write this process's address for Prometheus; return the file, or None if this machine has no such run folder."""
    labels = metrics.process_labels()
    if run.folder is None or not run.folder.is_dir() or not labels["instance"]:
        return None
    name = run.folder.absolute().name
    _, _, port = server.address.rpartition(":")
    scheme, _, _ = server.url.partition(":")
    file = targets_folder(run.folder) / f"{name}.{labels['instance']}.json"
    target = {"targets": [f"{network.advertised}:{port}"], "labels": {**labels, "run": name, "__scheme__": scheme}}
    try:
        write_atomically(file, json.dumps([target]) + "\n")
    except OSError as error:
        log.warning("metrics.not_announced", file=str(file), reason=error.strerror)
        return None
    return file
