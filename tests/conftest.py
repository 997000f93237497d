"""What the test run says at its end: how many of ONNX's node tests pass, where they were run."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The counts of `tests/onnx_nodes.txt`, which the tests just held to; each operator's where nothing else was run."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    if not any("test_onnx_nodes" in report.nodeid for report in reports):
        return
    import onnx_nodes

    terminalreporter.section("ONNX node tests, passed / all")
    if all("test_onnx_nodes" in report.nodeid for report in reports):
        terminalreporter.write_line(onnx_nodes.operators_summary())
    terminalreporter.write_line(onnx_nodes.totals_summary())
