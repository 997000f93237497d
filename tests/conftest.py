"""Selection of tests, builds of kernels during tests, and a summary of ONNX's node tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support.caches import (
    kernels_built_as_for_users,
    kernels_built_by_runs,
    kernels_unoptimised,
    launches_unchained,
    optimisation,
    rates_as_shipped,
)
from tests.support.selection import is_on, one_of_each_file, sample

HERE = Path(__file__).parent

# How long an example takes says how busy the machine is, not whether the code is right.
hypothesis.settings.register_profile("any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("any machine")


OPTIMISED = ("cli/test_demo", "conformance/test_trained", "profiler", "runtime/kernels")
"""Tests of networks of full size, of times, and of builds: drivers optimise kernels there, as they do for users."""

OPTIMISED_WHEN_THOROUGH = ("compiler/lowering", "compiler/operators", "compiler/selection", "compiler/weights", "conformance")
"""The tests of kernels, on all runtimes and memory paths: drivers optimise kernels there with `--thorough`."""


SAMPLED = ("base", "benchmarks", "bundle", "cli", "compiler", "conformance", "fuzz", "profiler", "runtime", "tools")
"""Folders of tests that compile and run models, or start processes. A plain run takes a sample of them."""


ON_DRIVERS = (
    "compiler/lowering",
    "conformance/test_exact",
    "conformance/test_models",
    "conformance/test_onnx",
    "runtime/opencl/test_masked_reads",
    "tools/doctor",
)
"""The folders whose tests a run on another driver takes a sample of (`--driver`)."""


NODE_TESTS = "ONNX node tests"
"""The name of a property: the counts of the node tests as text, and of each operator with another ending."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--thorough`."""
    parser.addoption("--thorough", action="store_true", help="run all tests, on all OpenCL runtimes")
    parser.addoption(
        "--driver", metavar="DESCRIPTOR", help="run tests on the device of this descriptor only (tools/cpu_drivers.py)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--thorough`, select a sample of the tests in `SAMPLED` folders (see CONTRIBUTING.md)."""
    driver, thorough = config.getoption("driver"), config.getoption("thorough")
    if thorough and not driver:
        return
    plain = items if thorough else [item for item in items if not item.get_closest_marker("thorough")]
    if driver:
        marked = [item for item in plain if item.get_closest_marker("every_driver")]
        of_driver = [*marked, *(item for item in plain if is_on(item.nodeid, driver) and item not in marked)]
        files = {item.path for item in marked}
        inside = (item for item in of_driver if _within(item, ON_DRIVERS) and (item in marked or item.path not in files))
        taken = {item.nodeid for item in of_driver} if thorough else one_of_each_file(item.nodeid for item in inside)
    else:
        taken = sample(item.nodeid for item in plain if _within(item, SAMPLED))
        taken |= {item.nodeid for item in plain if not _within(item, SAMPLED)}
    kept, left = [], []
    for item in items:
        (kept if item.nodeid in taken else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def _within(item: pytest.Item, folders: tuple[str, ...]) -> bool:
    """Whether the test's file is in one of `folders` of tests, or its path starts like one of them."""
    return item.path.is_relative_to(HERE) and item.path.relative_to(HERE).as_posix().startswith(folders)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before fixtures of any scope: whether drivers optimise the kernels of this test."""
    listed = _within(item, OPTIMISED) or (item.config.getoption("thorough") and _within(item, OPTIMISED_WHEN_THOROUGH))
    strict = item.path.name.startswith("test_strict")  # which watches the calls of OpenCL
    apart = item.get_closest_marker("build_apart") is not None  # as for users
    optimisation.on = apart or (listed and not strict and item.get_closest_marker("unoptimised") is None)
    # PoCL 7.1 answers wrongly, or crashes, in kernels of attention that it was told not to optimise.
    optimisation.always = bool(item.config.getoption("driver"))


@pytest.fixture(scope="session", autouse=True)
def _kernels_built_by_runs() -> Iterator[None]:
    """Build kernels in the test's process when a session needs them, in fixtures too."""
    with pytest.MonkeyPatch.context() as patch:
        kernels_built_by_runs(patch)
        kernels_unoptimised(patch)
        launches_unchained(patch)
        rates_as_shipped(patch)
        yield


@pytest.fixture(autouse=True)
def _kernels_built_apart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("build_apart"):
        kernels_built_as_for_users(monkeypatch)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the counts of `onnx_nodes.txt`, which the tests have just compared; those of each operator if only they ran.

    A test has recorded them, because reading the node tests takes this process seconds.
    """
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    counts = {key: value for report in reports for key, value in report.user_properties if key.startswith(NODE_TESTS)}
    if not counts:
        return
    terminalreporter.section("ONNX node tests, passed / all")
    if all("test_onnx_nodes" in report.nodeid for report in reports):
        terminalreporter.write_line(counts[f"{NODE_TESTS}, by operator"])
    terminalreporter.write_line(counts[NODE_TESTS])
