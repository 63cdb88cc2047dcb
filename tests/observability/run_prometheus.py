"""Alerts and dashboards on a real Prometheus that scrapes a real run: `make test-observability`.

Needs Debian's packages prometheus and prometheus-alertmanager.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.bus.connection import connect
from penstock.config import load
from penstock.runtime.security import Security
from penstock.testing.train_process import RECIPE, TrainProcess, started
from services.recipe import Recipe
from tests.observability.alertmanager import Alertmanager, notifying
from tests.observability.prometheus import ALERTS, Prometheus, scraping
from tests.observability.servers import ROOT
from tests.support.waiting import HANG_S

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.leaves_behind("a process that is killed with -9 has no time to remove its temporary files", "file"),
]

TOKEN = "0b7e5f6c9d2a48138f1d2e3c4b5a6978"
DASHBOARDS = ROOT / "deploy" / "grafana" / "dashboards"
PROCESSES = {"trainer", "router", "reward", "worker-0", "rollout-0", "rollout-1"}
STEPS_FOR_DATA = 8
DATA_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Observed:
    """A run, the Prometheus that scrapes it, and the Alertmanager that this tells."""

    run: TrainProcess
    prometheus: Prometheus
    alertmanager: Alertmanager


@pytest.fixture(scope="module")
async def observed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Observed]:
    """The demo with small steps, at its eighth step; the token is required everywhere."""
    tmp_path = tmp_path_factory.mktemp("observed")
    overrides = {
        "run.dir": tmp_path / "runs",
        "metrics.port": 0,
        "trainer.num_steps": 5000,
        "trainer.groups_per_step": 8,
        "trainer.max_staleness": 2,
    }
    arguments = (f"--{key}={value}" for key, value in overrides.items())
    with (
        started(tmp_path, str(RECIPE), *arguments, environment={"PENSTOCK_TOKEN": TOKEN}) as run,
        notifying() as alertmanager,
        scraping(run.runs, TOKEN, alertmanager=alertmanager.address) as prometheus,
    ):
        await asyncio.to_thread(run.wait_for_step, STEPS_FOR_DATA)
        yield Observed(run, prometheus, alertmanager)


def rules() -> list[dict[str, Any]]:
    """The rules of deploy/prometheus/alerts.yml."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str, set[str]]]:
    """Each query of each panel, after its dashboard and title, and the labels in its legend."""
    for file in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", ()):
                legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                yield f"{file.stem}: {panel['title']}: {target['expr']}", target["expr"], legend


def named(expression: str) -> set[str]:
    """The metrics that an expression names."""
    return set(re.findall(r"\b(?:penstock_\w+|sglang:\w+|process_\w+|up(?=\{))", expression))


def test_rules_are_valid_and_pass_their_unit_tests() -> None:
    """promtool knows every expression, and every alert has tests."""
    subprocess.run(["promtool", "check", "rules", str(ALERTS)], check=True)
    subprocess.run(["promtool", "test", "rules", str(ROOT / "tests/observability/alerts.yml")], check=True)
    tests = yaml.safe_load((ROOT / "tests/observability/alerts.yml").read_text())["tests"]
    tested = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert tested == {rule["alert"] for rule in rules()}


@pytest.mark.parametrize("index", range(len(rules())), ids=[rule["alert"] for rule in rules()])
def test_a_rule_s_unit_test_can_fail(index: int, tmp_path: Path) -> None:
    """A rule that never fires does not pass."""
    content = yaml.safe_load(ALERTS.read_text())
    content["groups"][0]["rules"][index]["expr"] = "vector(0) > 1"
    (tmp_path / "alerts.yml").write_text(json.dumps(content))
    tests = yaml.safe_load((ROOT / "tests/observability/alerts.yml").read_text())
    (tmp_path / "tests.yml").write_text(json.dumps(tests | {"rule_files": ["alerts.yml"]}))
    done = subprocess.run(["promtool", "test", "rules", str(tmp_path / "tests.yml")], capture_output=True, check=False)
    assert done.returncode != 0


def test_the_compose_stack_s_configurations_are_valid() -> None:
    """Those of Prometheus and of Alertmanager."""
    deploy = ROOT / "deploy" / "prometheus"
    command = ["promtool", "check", "config", "--syntax-only", str(deploy / "prometheus.yml")]
    subprocess.run(command, check=True)
    subprocess.run(["amtool", "check-config", str(deploy / "alertmanager.yml")], check=True)


async def test_every_process_is_found_and_scraped(observed: Observed) -> None:
    """By the files in the run's folder, with the token, under its own name."""
    targets = (await observed.prometheus.get("targets"))["activeTargets"]
    assert {
        target["labels"]["instance"]: (target["health"], target["lastError"]) for target in targets
    } == dict.fromkeys(PROCESSES, ("up", ""))
    assert {target["labels"]["run"] for target in targets} == {observed.run.folder.name}


async def test_every_query_of_every_panel_has_data(observed: Observed) -> None:
    """An empty panel is a metric that was renamed, or a label that is not there; so is a line without its name."""
    missing = {name: (query, legend) for name, query, legend in queries()}
    assert len(missing) > 50
    nameless = set[str]()
    deadline = time.monotonic() + DATA_TIMEOUT_S
    while missing and time.monotonic() < deadline:
        for name, (query, legend) in list(missing.items()):
            filled = query.replace("$__rate_interval", "20s").replace('run=~"$run"', 'run=~".*"')
            if found := await observed.prometheus.series(filled):
                del missing[name]
                nameless |= {name for labels, _ in found if not legend <= labels.keys()}
        await asyncio.sleep(2.0)
    assert (sorted(missing), sorted(nameless)) == ([], [])


async def test_the_reader_can_choose_the_run(observed: Observed) -> None:
    """The dashboards' list of runs asks for the values of a label."""
    for file in DASHBOARDS.glob("*.json"):
        variables = {each["name"]: each for each in json.loads(file.read_text())["templating"]["list"]}
        asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variables["run"]["query"])
        assert asked is not None
        assert await observed.prometheus.get(f"label/{asked[2]}/values", **{"match[]": asked[1]}) == [
            observed.run.folder.name
        ]


async def test_every_rule_is_evaluated_over_metrics_that_exist(observed: Observed) -> None:
    """A rule over a metric that nobody exports would never fire."""
    state = (await observed.prometheus.get("rules"))["groups"][0]["rules"]
    assert {rule["name"]: (rule["health"], rule.get("lastError", "")) for rule in state} == {
        rule["alert"]: ("ok", "") for rule in rules()
    }
    names = {name for rule in rules() for name in named(rule["expr"])}
    deadline = time.monotonic() + DATA_TIMEOUT_S
    while names and time.monotonic() < deadline:  # not every step has every number
        names = {name for name in names if not await observed.prometheus.values(f"count({name})")}
        await asyncio.sleep(1.0)
    assert names == set()


async def test_a_run_without_faults_raises_no_alert(observed: Observed) -> None:
    """Two engines share two cores with the trainer, so it may wait for them."""
    assert await observed.prometheus.firing() <= {"PenstockTrainerIdle"}


async def test_alerts_fire_for_real_faults(observed: Observed) -> None:
    """A worker and engines freeze, the reward service is killed twice, a message cannot be read; people are told."""
    run, prometheus = observed.run, observed.prometheus
    live = load(Recipe, [run.folder / "live.toml"])
    await asyncio.to_thread(run.kill, "reward")
    async with asyncio.timeout(HANG_S):  # until the new one is scraped
        while not await prometheus.values('changes(process_start_time_seconds{instance="reward"}[30m]) > 0'):
            await asyncio.sleep(1.0)
    await asyncio.to_thread(run.kill, "reward")
    async with connect(live.bus, run=live.run.name, security=Security(token=TOKEN, nats_token=TOKEN)) as bus:
        await bus.publish(bus.prompts, b"no record", message_id="unreadable")
        fired = await prometheus.until_firing({"PenstockRestarts", "PenstockDeadLetters"}, timeout_s=180)
    frozen = [pid for name, pid in run.processes().items() if name.startswith(("worker", "rollout"))]
    assert len(frozen) == 3
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        fired |= await prometheus.until_firing(
            {"PenstockProcessDown", "PenstockNoReplica", "PenstockGateClosed", "PenstockStepStuck"}, timeout_s=300
        )
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    print(f"seconds until they fired: {fired}")  # noqa: T201 - for whoever runs it with -s
    await observed.alertmanager.until_told(set(fired), "firing", timeout_s=HANG_S)
    step = run.rows()[-1]["step"]
    await asyncio.to_thread(run.wait_for_step, step + 3)
    over = {"PenstockProcessDown", "PenstockNoReplica", "PenstockStepStuck"}
    async with asyncio.timeout(120):
        while over & await prometheus.firing():
            await asyncio.sleep(1.0)
    await observed.alertmanager.until_told(over, "resolved", timeout_s=HANG_S)
