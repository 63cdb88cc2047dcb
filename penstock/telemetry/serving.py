"""Serves this process's metrics if the recipe asks for it; otherwise nothing of the server is imported."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.config import MetricsConfig, NetworkConfig, RunConfig
from penstock.runtime.security import Security


def targets_folder(run_folder: Path) -> Path:
    """Return the folder in which processes of this run and its neighbours name their ports.

    It is beside the run's folder, because Prometheus takes a pattern in the last part of a path only.
    """
    return run_folder.absolute().parent / "prometheus"


@asynccontextmanager
async def serving_metrics(
    config: MetricsConfig, run: RunConfig, network: NetworkConfig, security: Security
) -> AsyncIterator[None]:
    """Serve /metrics on `config.port` during the context, if that is set; see `penstock.http.metrics`.

    Raises:
        SetupError: the port is in use.
    """
    if config.port is None:
        yield
        return
    from penstock.http.metrics import serving  # FastAPI and uvicorn take a while to import

    async with serving(config.port, run, network, security):
        yield
