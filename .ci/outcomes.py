"""A pytest plugin that writes every test's start and outcomes to a file, line by line, for `run_tests.py`.

A line is written when its event happens, so that the file is complete however pytest ends.
"""

import json
from pathlib import Path

import pytest


class _Outcomes:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(nodeid, "started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._write(report.nodeid, report.outcome)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(nodeid, "finished")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed")

    def _write(self, test: str, event: str) -> None:
        self._file.write(json.dumps([test, event]) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--outcomes FILE`."""
    parser.addoption("--outcomes", type=Path, help="file that receives every test's outcomes")


def pytest_configure(config: pytest.Config) -> None:
    """Watch where the reports of all workers come together."""
    if config.getoption("--outcomes") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(config.getoption("--outcomes")))
