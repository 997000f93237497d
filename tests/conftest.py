"""How the test run builds kernels, and what it says at its end: how many of ONNX's node tests pass, where they were run."""

from __future__ import annotations

import pytest

from flashmem.runtime.serving.runtime import Runtime
from flashmem.runtime.session import Session

APART = (
    "test_interrupts", "test_kernel_builder", "test_outputs", "test_process_memory", "test_program_cache",
    "test_runtime_failures", "test_surroundings",
)  # fmt: skip
"""Tests of what sessions do by default: missing kernels are built in child processes, a second for each session."""


@pytest.fixture(autouse=True)
def _kernels_built_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.module.__name__ not in APART:
        for kind in (Session, Runtime):
            monkeypatch.setitem(kind.__init__.__kwdefaults__, "build_apart", False)


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
