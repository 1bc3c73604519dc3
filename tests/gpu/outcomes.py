"""A plugin of pytest that writes each test's outcome as soon as it is known.

A run that a time limit ends leaves what it has found: ``-p tests.gpu.outcomes --outcomes FILE``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--outcomes``."""
    parser.addoption("--outcomes", type=Path, help="file for a line of JSON for every test")


def pytest_configure(config: pytest.Config) -> None:
    """Writes in one process: the others of xdist report to it."""
    path = config.getoption("--outcomes")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(path))


class _Outcomes:
    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", str(report.longrepr), 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return
        said = "" if report.passed else str(report.longrepr)
        if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
            said = str(report.longrepr[-1]).removeprefix("Skipped: ")
        outcome: str = report.outcome
        if hasattr(report, "wasxfail"):
            outcome, said = "xfailed" if report.skipped else "xpassed", report.wasxfail
        self._write(report.nodeid, outcome, said, report.duration)

    def _write(self, test: str, outcome: str, said: str, seconds: float) -> None:
        line = {"test": test, "outcome": outcome, "said": said, "seconds": round(seconds, 2)}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
