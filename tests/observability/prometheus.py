"""A real Prometheus with the configuration that docs/operation/prometheus.md shows, and the rules of deploy/."""

import asyncio
import json
import math
import subprocess
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

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
PAGE = ROOT / "docs" / "operation" / "prometheus.md"


def shown_configuration() -> dict[str, Any]:
    """The scrape configuration that the document shows for a run on one machine."""
    block = PAGE.read_text().split("```yaml\n")[1].split("```")[0]
    return dict(yaml.safe_load(block))


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running server."""

    url: str
    log: Path

    async def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer of its API."""
        async with httpx.AsyncClient(base_url=self.url, timeout=20.0) as client:
            answer = (await client.get(f"/api/v1/{path}", params=parameters)).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    async def values(self, query: str) -> list[float]:
        """Return the finite values of a query."""
        found = [float(each["value"][1]) for each in (await self.get("query", query=query))["result"]]
        return [value for value in found if math.isfinite(value)]

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


@contextmanager
def scraping(runs: Path, token: str) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes all runs below `runs` every two seconds."""
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
        (folder / "prometheus.yml").write_text(json.dumps(config))
        [port] = free_ports(1)
        log = folder / "log"
        command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=sink, stderr=subprocess.STDOUT
            )
        try:
            _wait_until_ready(f"http://127.0.0.1:{port}", process, log)
            yield Prometheus(f"http://127.0.0.1:{port}", log)
        finally:
            process.terminate()
            process.wait(20)


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    for _ in range(300):
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(f"{url}/-/ready").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError(log.read_text())
