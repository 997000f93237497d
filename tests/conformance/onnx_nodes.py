"""The node tests of the onnx package, and the checked-in list of flashmem's results.

`onnx_nodes.txt` names every test once: first those that pass, then those that do not run, under the reason. Every line is an
operator, a test, and the inputs that are constants (see `flashmem.tools.onnx_backend`). Commands:

    python -m tests.conformance.onnx_nodes --write      runs every test on every OpenCL device, on one memory path (minutes)
    python -m tests.conformance.onnx_nodes --write --only cast  runs those with "cast" in their name only
    python -m tests.conformance.onnx_nodes              prints what the list says: passed / all, for each operator and together
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import re
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
from onnx import numpy_helper

from flashmem.base.types import DType
from tests.support.isolated import call_isolated

LIST = Path(__file__).with_suffix(".txt")
PASSES = "passes"
PATHS = ("buffer", "texture")

_DOWNSAMPLED = (
    "the answer is ONNX Runtime's, which aligns the corners of the output as it is, not of the one before rounding its size"
)
_RANDOM = "the answer is random"
_ROUNDED = "the answer has the rounding errors of a transform in float32 where it should be 0; ours are smaller"
DIFFERS = {
    **{f"test_bernoulli{kind}{form}": _RANDOM for kind in ("", "_double", "_seed") for form in ("", "_expanded")},
    "test_dft_inverse": _ROUNDED,
    "test_dft_inverse_opset19": _ROUNDED,
    "test_resize_downsample_scales_cubic_align_corners": _DOWNSAMPLED,
    "test_resize_downsample_scales_linear_align_corners": _DOWNSAMPLED,
}
"""Tests whose expected answer differs from flashmem's, with the reason."""

_COMPUTED = {*get_args(DType), "float16", "bfloat16", "float64"}

_HEADER = f"""\
# The node tests of onnx {onnx.__version__}. Written by: python -m tests.conformance.onnx_nodes --write
# A line is an operator, a test, and its inputs that are constants; the heading above it says why the test does not run.
"""


@functools.cache
def cases() -> Mapping[str, Any]:
    """Every node test of the onnx package, by name: models, inputs, expected outputs, tolerances."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        return {case.name: case for case in collect_testcases(None)}


def operator(case: Any) -> str:
    """The operator that `case` tests; for an expanded form, the original operator."""
    original = cases().get(case.name.split("_expanded")[0], case)
    node = original.model.graph.node[-1]
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"


def read_list() -> dict[str, list[tuple[str, str]]]:
    """The checked-in list: (operator, test) under `PASSES` and under each reason why tests do not run."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            sections[line[1:-1]] = current = []
        elif line and not line.startswith("#"):
            op, name, *_ = line.split(" ")
            current.append((op, name))
    return sections


def read_constants() -> dict[str, tuple[str, ...]]:
    """The inputs that are constants, by test, from the checked-in list."""
    lines = [line.split(" ") for line in LIST.read_text(encoding="utf-8").splitlines() if line and line[0] not in "[#"]
    return {name: tuple(constants) for _, name, *constants in lines}


def counts() -> dict[str, tuple[int, int]]:
    """(passed, total) of the node tests of each operator, from the checked-in list."""
    passed: defaultdict[str, int] = defaultdict(int)
    total: defaultdict[str, int] = defaultdict(int)
    for reason, tests in read_list().items():
        for op, _ in tests:
            passed[op] += reason == PASSES
            total[op] += 1
    return {op: (passed[op], total[op]) for op in sorted(total)}


def is_plain(case: Any) -> bool:
    """Whether every input and output of `case` is a tensor with elements, of a type that flashmem supports."""
    given = (each for inputs, expected in case.data_sets or () for each in (*inputs, *expected))
    arrays = [numpy_helper.to_array(each) if isinstance(each, onnx.TensorProto) else each for each in given]
    return all(isinstance(each, np.ndarray | np.generic) and each.size and each.dtype.name in _COMPUTED for each in arrays)


def check(case: Any, answers: Sequence[Any], expected: Sequence[Any]) -> None:
    """Raise AssertionError unless `answers` satisfy the onnx package's own runner: types, shapes, its tolerances."""
    from onnx.backend.test.runner import Runner

    arrays = [numpy_helper.to_array(each) if isinstance(each, onnx.TensorProto) else each for each in expected]
    with np.errstate(all="ignore"):
        Runner.assert_similar_outputs(arrays, answers, case.rtol, case.atol)


def outcome(case: Any, device: str, path: str) -> tuple[str, tuple[str, ...]]:
    """`PASSES` and the inputs that are constants, or the reason why `case` cannot run on `device`.

    Raises:
        AssertionError: it runs with a wrong result.
    """
    import flashmem.tools.onnx_backend as backend
    from flashmem.base.errors import UnsupportedModelError, UserError

    try:
        with backend.prepare(case.model, device, memory_path=path) as prepared:
            for inputs, expected in case.data_sets:
                check(case, prepared.run(inputs), expected)
            return PASSES, prepared.constants
    except UnsupportedModelError as error:
        return "; ".join(dict.fromkeys(reason for _, reason in error.nodes)) or _line(error), ()
    except UserError as error:
        return re.sub(r"'[^']*'", "'…'", _line(error)), ()
    except AssertionError:
        if case.name in DIFFERS:
            return DIFFERS[case.name], ()
        raise


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _everywhere(task: tuple[str, tuple[tuple[str, str], ...]]) -> tuple[str, tuple[str, ...]]:
    """The outcome of a test on devices and paths. An error starts with "WRONG", which the tests do not accept."""
    name, places = task
    constants: tuple[str, ...] = ()
    for device, path in places:
        try:
            reason, constants = outcome(cases()[name], device, path)
        except Exception as error:  # any exception is a finding
            return f"WRONG ({device}, {path}): {type(error).__name__}: {_line(error)[:200]}", ()
        if reason != PASSES:
            return reason, ()
    return PASSES, constants


def _devices() -> tuple[str, ...]:
    from flashmem.runtime.opencl.discovery import list_devices

    return tuple(device.descriptor_name for device in list_devices())


def _write(outcomes: Mapping[str, tuple[str, tuple[str, ...]]]) -> None:
    sections: defaultdict[str, list[str]] = defaultdict(list)
    for name, (reason, constants) in outcomes.items():
        sections[reason].append(f"{' '.join((operator(cases()[name]), name, *constants))}\n")
    order = [PASSES, *sorted(sections.keys() - {PASSES})]
    blocks = [f"\n[{reason}]\n{''.join(sorted(sections[reason]))}" for reason in order]
    LIST.write_text(_HEADER + "".join(blocks), encoding="utf-8")


def operators_summary() -> str:
    """Passed / all of each operator's tests, a line each."""
    return "\n".join(f"{op}: {passed} / {total}" for op, (passed, total) in counts().items())


def totals_summary() -> str:
    """Passed / all of the tests, and of those whose data are plain tensors (see `is_plain`)."""
    passed = {name for _, name in read_list().get(PASSES, ())}
    plain = {name for name, case in cases().items() if is_plain(case)}
    return (
        f"all tests: {len(passed)} / {len(cases())}\n"
        f"those whose data are tensors with elements, floats of 16 to 64 bits, integers of 8 to 64, booleans: "
        f"{len(passed & plain)} / {len(plain)}"
    )


def main() -> None:
    """The command line; see the module docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance.onnx_nodes", description="The node tests of the onnx package."
    )
    parser.add_argument("--write", action="store_true", help="run all tests everywhere and write the list")
    parser.add_argument("--only", default="", help="run only tests with this in their name")
    parser.add_argument("--device", help="run them on these only: pocl,intel-cpu (default: all that are here)")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count(), help="processes (default: one a core)")
    arguments = parser.parse_args()
    if arguments.write:
        devices = tuple(arguments.device.split(",")) if arguments.device else _devices()
        tasks = [
            (name, tuple((device, PATHS[(index + other) % 2]) for other, device in enumerate(devices)))
            for index, name in enumerate(sorted(cases()))
            if arguments.only in name
        ]
        constants = read_constants()
        listed = [(name, reason) for reason, tests in read_list().items() for _, name in tests] if arguments.only else []
        outcomes = {name: (reason, constants[name]) for name, reason in listed}
        done = call_isolated(_everywhere, tasks, jobs=arguments.jobs, timeout=300)
        for count, ((name, _), result) in enumerate(done, 1):
            outcomes[name] = (f"WRONG: {result}", ()) if isinstance(result, str) else result
            print(f"{count} / {len(tasks)}", end="\r", flush=True)
        _write(outcomes)
    print(operators_summary())
    print(totals_summary())


if __name__ == "__main__":
    main()
