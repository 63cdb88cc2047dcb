"""A real Prometheus with the configuration that docs/operation/prometheus.md shows, and the rules of deploy/."""

import asyncio
import json
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from penstock.runtime.ports import free_ports
from tests.observability.servers import DEPLOY, ROOT, running

ALERTS = DEPLOY / "prometheus" / "alerts.yml"
PAGE = ROOT / "docs" / "operation" / "prometheus.md"


def shown_configuration() -> dict[str, Any]:
    """The scrape configuration that the document shows for a run on one machine."""
    block = PAGE.read_text().split("```yaml\n")[1].split("```")[0]
    return dict(yaml.safe_load(block))


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running server."""

    url: str

    async def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer of its API."""
        async with httpx.AsyncClient(base_url=self.url, timeout=20.0) as client:
            answer = (await client.get(f"/api/v1/{path}", params=parameters)).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    async def series(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Return the finite values of a query, each after its labels."""
        found = [(each["metric"], float(each["value"][1])) for each in (await self.get("query", query=query))["result"]]
        return [(labels, value) for labels, value in found if math.isfinite(value)]

    async def values(self, query: str) -> list[float]:
        """Return the finite values of a query."""
        return [value for _, value in await self.series(query)]

    async def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        alerts = (await self.get("alerts"))["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    async def until_firing(self, names: set[str], *, timeout_s: float) -> dict[str, float]:
        """Wait until each of these alerts has fired; return the seconds that it took."""
        began, fired = time.monotonic(), dict[str, float]()
        while missing := names - fired.keys():
            assert time.monotonic() - began < timeout_s, f"{sorted(missing)} did not fire within {timeout_s} s"
            for name in await self.firing() & missing:
                fired[name] = round(time.monotonic() - began, 1)
            await asyncio.sleep(1.0)
        return fired


def alerting(alertmanager: str) -> dict[str, Any]:
    """Return where the compose stack's Prometheus sends alerts, with another address."""
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["alerting"]
    (servers,) = found["alertmanagers"]
    assert servers["static_configs"] == [{"targets": ["alertmanager:9093"]}]
    servers["static_configs"] = [{"targets": [alertmanager]}]
    return found


@contextmanager
def scraping(runs: Path, token: str, *, alertmanager: str) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes all runs below `runs` every two seconds, and sends alerts to `alertmanager`."""
    with tempfile.TemporaryDirectory(prefix="prometheus-") as name:
        folder = Path(name)
        config = shown_configuration()
        (job,) = config["scrape_configs"]
        (folder / "token").write_text(token)
        assert job["file_sd_configs"][0]["files"] == ["/home/me/runs/prometheus/*.json"]
        job["file_sd_configs"][0]["files"] = [str(runs / "prometheus" / "*.json")]
        job["authorization"]["credentials_file"] = str(folder / "token")
        job["scrape_interval"] = "2s"
        config |= {"rule_files": [str(ALERTS)], "global": {"evaluation_interval": "2s"}}
        config["alerting"] = alerting(alertmanager)
        (folder / "prometheus.yml").write_text(json.dumps(config))
        [port] = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        with running([*command, f"--web.listen-address=127.0.0.1:{port}"], url=url, log=folder / "log"):
            yield Prometheus(url)
