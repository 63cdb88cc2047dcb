"""The server that has nothing but /metrics, and the file that names it to Prometheus."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config import MetricsConfig, NetworkConfig, RunConfig
from penstock.errors import SetupError
from penstock.http.metrics import serving
from penstock.runtime.ports import free_ports
from penstock.runtime.security import Security
from penstock.telemetry import metrics
from penstock.telemetry.serving import serving_metrics
from services.launch.run_folder import RunFolder
from tests.support.certificates import make_certificates, security_of
from tests.support.waiting import HANG_S

TOKEN = "5f0c6f7a3f0b4f6d9d0e0a1b2c3d4e5f"
NETWORK = NetworkConfig()


@pytest.fixture(autouse=True)
def named() -> Iterator[None]:
    """This process is the run's second worker."""
    before = metrics._process
    metrics._process = metrics._Process()
    metrics.name_process(service="worker", name="worker-1", run="first")
    yield
    metrics._process = before


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    """A run with a folder on this machine."""
    (tmp_path / "first-1").mkdir()
    return RunConfig(folder=tmp_path / "first-1")


def targets(folder: Path) -> dict[str, Any]:
    """The files that Prometheus reads, by name."""
    return {file.name: json.loads(file.read_text()) for file in (folder / "prometheus").iterdir()}


async def test_the_page_needs_the_token() -> None:
    """As every port does; health does not exist here."""
    async with (
        serving(0, RunConfig(), NETWORK, Security(token=TOKEN)) as server,
        httpx.AsyncClient(base_url=server.url, timeout=HANG_S) as client,
    ):
        assert (await client.get("/metrics")).status_code == 401
        answer = await client.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 200
        assert answer.headers["content-type"] == metrics.CONTENT_TYPE
        assert "process_resident_memory_bytes" in answer.text


async def test_paths_of_callers_are_no_labels() -> None:
    """A route's pattern is; each label is a time series."""
    async with (
        serving(0, RunConfig(), NETWORK, Security()) as server,
        httpx.AsyncClient(base_url=server.url, timeout=HANG_S) as client,
    ):
        await client.get("/made/up")
        page = (await client.get("/metrics")).text
        page = (await client.get("/metrics")).text
    assert 'penstock_http_requests_total{route="other",status="404"}' in page
    assert 'penstock_http_requests_total{route="/metrics",status="200"}' in page
    assert "made/up" not in page


async def test_what_callers_make_up_is_no_label() -> None:
    """Methods of HTTP, hosts, headers, queries, wrong tokens. Strangers are counted together, whatever they ask for."""
    token = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        serving(0, RunConfig(), NETWORK, Security(token=TOKEN)) as server,
        httpx.AsyncClient(base_url=server.url, timeout=HANG_S) as client,
    ):
        before = _http_labels((await client.get("/metrics", headers=token)).text)
        for number in range(5):
            name = f"invented{number}"
            stranger = await client.get(f"/{name}", headers={"Authorization": f"Bearer {name}", "X-Name": name})
            assert stranger.status_code == 401
            assert (await client.request(name.upper(), "/metrics", headers=token)).status_code == 400
            assert (await client.request("PROPFIND", "/metrics", headers=token)).status_code == 405
            await client.get(f"/metrics?name={name}", headers=token | {"Host": name, "User-Agent": name})
        page = (await client.get("/metrics", headers=token)).text
    assert "invented" not in page.lower()
    assert "PROPFIND" not in page
    routes = {route for route, _ in _http_labels(page) - before}
    assert routes <= {"refused", "other", "/metrics"}
    assert ("refused", "401") in _http_labels(page)


def _http_labels(page: str) -> set[tuple[str, str]]:
    """Routes and statuses that have been counted."""
    return set(re.findall(r'penstock_http_requests_total{route="([^"]*)",status="([^"]*)"}', page))


async def test_a_process_names_its_port_beside_the_run_s_folder(run: RunConfig, tmp_path: Path) -> None:
    """In Prometheus' format, under a name that it keeps over restarts; at its end the file is gone."""
    async with serving(0, run, NETWORK, Security()) as server:
        labels = {"service": "worker", "instance": "worker-1", "run": "first-1", "__scheme__": "http"}
        assert targets(tmp_path) == {"first-1.worker-1.json": [{"targets": [server.address], "labels": labels}]}
    assert targets(tmp_path) == {}


async def test_with_tls_prometheus_is_told_to_use_it(run: RunConfig, tmp_path: Path) -> None:
    """And others are told the host that the process advertises."""
    security = security_of(make_certificates(tmp_path), token=TOKEN)
    network = NetworkConfig(advertise_host="node7")
    async with serving(0, run, network, security) as server:
        [[target]] = targets(tmp_path).values()
        assert target["targets"] == [f"node7:{server.address.rpartition(':')[2]}"]
        assert target["labels"]["__scheme__"] == "https"


async def test_a_folder_of_another_machine_is_not_made(tmp_path: Path) -> None:
    """The recipe of a run may name a folder that is not here."""
    async with serving(0, RunConfig(folder=tmp_path / "elsewhere"), NETWORK, Security()):
        assert list(tmp_path.iterdir()) == []


async def test_a_launch_forgets_what_killed_processes_left(run: RunConfig, tmp_path: Path) -> None:
    """Its own, not those of runs whose names begin alike; and the folder goes with the last of them."""
    left = tmp_path / "prometheus"
    left.mkdir()
    for name in ("first-1", "first-10", "first-1.b"):
        target = {"targets": ["127.0.0.1:1"], "labels": {"run": name}}
        (left / f"{name}.worker-0.json").write_text(json.dumps([target]))
    RunFolder(tmp_path / "first-1").forget_targets()
    assert sorted(path.name for path in left.iterdir()) == ["first-1.b.worker-0.json", "first-10.worker-0.json"]
    for name in ("first-10", "first-1.b"):
        RunFolder(tmp_path / name).forget_targets()
    assert not left.exists()


async def test_a_taken_port_is_an_error_that_names_the_setting() -> None:
    """And without the setting there is no server."""
    [port] = free_ports(1)
    config = MetricsConfig(port=port)
    async with serving_metrics(config, RunConfig(), NETWORK, Security()):
        with pytest.raises(SetupError, match=rf"metrics\.port: cannot listen on 127\.0\.0\.1:{port}"):
            async with serving_metrics(config, RunConfig(), NETWORK, Security()):
                pass
    async with (
        serving_metrics(MetricsConfig(), RunConfig(), NETWORK, Security()),
        httpx.AsyncClient(timeout=HANG_S) as client,
    ):
        with pytest.raises(httpx.ConnectError):
            await client.get(f"http://127.0.0.1:{port}/metrics")
