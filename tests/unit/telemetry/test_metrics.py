"""The page for Prometheus, and the metrics that the services declare."""

import importlib
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
from prometheus_client.core import Metric

from penstock.telemetry import metrics

_ROOT = Path(__file__).parents[3]
PAGE = _ROOT / "docs" / "operation" / "prometheus.md"
_DECLARES = re.compile(r"\bmetrics\.(?:counter|gauge|histogram|reading)\(")

_LEVEL = metrics.reading("penstock_test_level", "Level of a test.", ("pool",))
_PASSED = metrics.reading("penstock_test_passed_total", "Passed in a test.", kind="counter")
_OF_TESTS = {"penstock_test_level", "penstock_test_passed_total"}


def declared() -> list[metrics.Declaration]:
    """The metrics of all processes."""
    for folder in ("penstock", "services"):
        for file in sorted((_ROOT / folder).rglob("*.py")):
            if _DECLARES.search(file.read_text()):
                importlib.import_module(".".join(file.relative_to(_ROOT).with_suffix("").parts))
    return [each for each in metrics.declared() if each.name not in _OF_TESTS]


async def test_readings_are_on_the_page_while_their_source_is_exposed() -> None:
    """With their labels, and as the kind that they are; a value that nobody has any more is gone."""

    async def read() -> Iterable[Metric]:
        return [_LEVEL.by({("easy",): 2, ("hard",): 0.5}), _PASSED.of(3)]

    with metrics.exposed(read):
        lines = (await metrics.page()).decode().splitlines()
        assert 'penstock_test_level{pool="easy"} 2.0' in lines
        assert 'penstock_test_level{pool="hard"} 0.5' in lines
        assert "penstock_test_passed_total 3.0" in lines
        assert "# TYPE penstock_test_passed_total counter" in lines
    assert "penstock_test_level" not in (await metrics.page()).decode()


async def test_the_page_says_which_process_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """For scrapes that find a process by its address only."""
    monkeypatch.setattr(metrics, "_process", metrics._Process())
    assert "penstock_process_info" not in (await metrics.page()).decode()
    metrics.name_process(service="worker", name="worker-1", run="first")
    page = (await metrics.page()).decode()
    assert 'penstock_process_info{name="worker-1",run="first",service="worker",version="' in page
    assert metrics.process_labels() == {"service": "worker", "instance": "worker-1"}


def test_a_name_is_declared_once_and_says_its_kind() -> None:
    """Prometheus would take either series for the other."""
    with pytest.raises(ValueError, match="declared twice"):
        metrics.reading("penstock_test_level", "Again.")
    with pytest.raises(ValueError, match="end in _total"):
        metrics.counter("penstock_test_calls", "Calls.")
    with pytest.raises(ValueError, match="end in _total"):
        metrics.reading("penstock_test_calls_total", "Calls.")


def test_the_document_has_every_metric() -> None:
    """Name, kind, labels and meaning, as the code declares them; and none that is gone."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `penstock_")]
    wanted = [
        f"| `{each.name}` | {each.kind} | {', '.join(f'`{label}`' for label in each.labels)} | {each.text} |"
        for each in declared()
    ]
    assert sorted(rows) == sorted(wanted)


def test_the_document_has_every_alert() -> None:
    """With its severity."""
    rows = re.findall(r"^\| `(Penstock\w+)` \| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    groups = yaml.safe_load((_ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    assert rows == [(rule["alert"], rule["labels"]["severity"]) for group in groups for rule in group["rules"]]


def test_dashboards_and_alerts_name_metrics_that_exist() -> None:
    """`make test-observability` asks a real Prometheus; this finds a metric that was renamed."""
    deploy = _ROOT / "deploy"
    texts = [path.read_text() for path in (*deploy.glob("grafana/dashboards/*.json"), deploy / "prometheus/alerts.yml")]
    named = {name for text in texts for name in re.findall(r"\bpenstock_\w+", text)}
    known = {
        f"{each.name}{suffix}"
        for each in declared()
        for suffix in (("_bucket", "_sum", "_count") if each.kind == "histogram" else ("",))
    }
    assert len(named) > 60
    assert named - known == set()


def test_no_metric_has_a_label_without_bound() -> None:
    """Each distinct value is a time series, which Prometheus keeps for weeks: ids have no place in a label."""
    known = {
        *("service", "name", "run", "version", "method", "code", "route", "status", "stream", "outcome", "end"),
        *("phase", "part", "lag", "set", "role", "condition", "reason", "state", "stage", "profile"),
    }
    assert {label for each in declared() for label in each.labels} == known
