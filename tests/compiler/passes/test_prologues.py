"""Elementwise operators before reductions and norms: one launch, which also writes their result if others read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import flashmem
from flashmem.runtime.opencl.devices import descriptor_for
from tests.compiler.operators.test_rms_norm import Steps
from tests.conformance.test_models import QUICK_PLACES
from tests.support.compared import DEVICES, OF_A_GPU, by_runtime, compare
from tests.support.inputs import KINDS, floats
from tests.support.launches import families_of, launches_of

ROWS = (2, 9, 37)


def _skip_layer_norm(n: Steps, x: str, y: str) -> None:
    """The sum is read again after the norm, as in every block before a product."""
    total = n.step("Add", x, y)
    norm = n.step("LayerNormalization", total, n.constant(1 + 0.1 * floats(37)), n.constant(floats(37, seed=2)))
    n.node("Add", n.step("MatMul", norm, n.constant(0.1 * floats(37, 37))), total)


def _skip_rms_norm(n: Steps, x: str, y: str) -> None:
    """The sum is an output."""
    [total] = n.node("Add", x, y)
    n.node("RMSNormalization", total, n.constant(1 + 0.1 * floats(37)))


def _reshaped_output(n: Steps, x: str, y: str) -> None:
    """The sum is an output in another shape."""
    total = n.step("Add", x, y)
    n.node("Reshape", total, n.constant(np.array([18, 37])))
    n.node("Softmax", total)


def _sum_of_products(n: Steps, x: str, y: str) -> None:
    n.node("ReduceSum", n.step("Mul", x, y), n.constant(np.array([-1])))


def _mean_of_functions(n: Steps, x: str, y: str) -> None:
    """One pass computes each once."""
    n.node("ReduceMean", n.step("Exp", n.step("Mul", n.step("Tanh", x), n.constant(floats(37)))), n.constant(np.array([-1])))


def _masked_softmax(n: Steps, x: str, y: str) -> None:
    n.node("Softmax", n.step("Where", n.constant(floats(9, 37) > 0), x, y))


def _log_sum(n: Steps, x: str, y: str) -> None:
    n.node("ReduceLogSumExp", n.step("Sub", x, n.constant(floats(9, 1))), n.constant(np.array([-1])))


def _functions_kept(n: Steps, x: str, y: str) -> None:
    """Computed once, and loaded in the other passes."""
    [value] = n.node("Tanh", n.step("Add", x, y))
    n.node("RMSNormalization", value, n.constant(1 + 0.1 * floats(37)))


Form = Callable[[Steps, str, str], None]

FUSED: dict[str, tuple[Form, list[str]]] = {
    "skip layer norm": (_skip_layer_norm, ["reduce_rows", "matmul"]),
    "skip rms norm": (_skip_rms_norm, ["reduce_rows"]),
    "reshaped output": (_reshaped_output, ["reduce_rows"]),
    "sum of products": (_sum_of_products, ["reduce_rows"]),
    "mean of functions": (_mean_of_functions, ["reduce_rows"]),
    "masked softmax": (_masked_softmax, ["reduce_rows"]),
    "log of sum": (_log_sum, ["reduce_rows"]),
    "functions kept": (_functions_kept, ["reduce_rows"]),
}


def _sum_beside_the_norm(n: Steps, x: str, y: str) -> None:
    total = n.step("Add", x, y)
    n.node("Mul", n.step("Softmax", total), total)


def _reader_before_the_norm(n: Steps, x: str, y: str) -> None:
    """The norm needs the result of another reader of the sum."""
    total = n.step("Add", x, y)
    top = n.step("ReduceMax", n.step("Transpose", total, perm=[0, 2, 1]), n.constant(np.array([-1])))
    n.node("Mul", n.step("Softmax", total), n.step("Transpose", top, perm=[0, 2, 1]))


def _functions_in_each_pass(n: Steps, x: str, y: str) -> None:
    n.node("Softmax", n.step("Tanh", n.step("Add", x, y)))


def _columns(n: Steps, x: str, y: str) -> None:
    n.node("Softmax", n.step("Add", x, y), axis=1)


APART: dict[str, tuple[Form, list[str]]] = {
    "sum beside the norm": (_sum_beside_the_norm, ["elementwise", "reduce_rows"]),
    "reader before the norm": (_reader_before_the_norm, ["elementwise", "movement", "reduce_rows", "reduce_rows"]),
    "functions in each pass": (_functions_in_each_pass, ["elementwise", "reduce_rows"]),
    "columns": (_columns, ["elementwise", "reduce_columns"]),
}


def made(form: Form, kind: str = "normal") -> Steps:
    """A model of one form."""
    n = Steps(opset=23)
    form(n, n.input(floats(*ROWS, kind=kind)), n.input(floats(*ROWS, kind=kind, seed=4)))
    return n


@pytest.mark.parametrize("name", [*FUSED, *APART])
def test_launches(name: str, tmp_path: Path) -> None:
    form, wanted = (FUSED | APART)[name]
    assert families_of(made(form).proto(), tmp_path) == wanted


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_numbers_of_every_kind(place: tuple[str, str], tmp_path: Path) -> None:
    n = Steps(opset=23)
    for kind in KINDS:
        x, y = n.input(floats(*ROWS, kind=kind)), n.input(floats(*ROWS, kind=kind, seed=4))
        for form, _ in (FUSED | APART).values():
            form(n, x, y)
    compare(n, place, tmp_path, against_runtime=False)


@pytest.mark.filterwarnings("ignore:.*was compiled for nvidia")
@pytest.mark.parametrize(("device", "path", "kernels"), OF_A_GPU)
def test_rows_that_work_items_share(device: str, path: str, kernels: str, tmp_path: Path) -> None:
    n = Steps(opset=23)
    for kind in ("around 1e3", "positive"):
        x, y = n.input(floats(70, 700, kind=kind)), n.input(floats(70, 700, kind=kind, seed=4))
        [total] = n.node("Add", x, y)
        n.node("LayerNormalization", total, n.constant(1 + 0.1 * floats(700)), n.constant(floats(700, seed=2)))
        n.node("ReduceSum", n.step("Mul", x, y), n.constant(np.array([-1])))
    compare(n, (device, path), tmp_path, against_runtime=False, compiled_for=kernels)


def test_long_rows_stay_elementwise_where_they_are_few(tmp_path: Path) -> None:
    """One row of a reduction runs on one core of a CPU; an elementwise launch on all."""
    for rows, wanted in ((4, ["elementwise", "reduce_rows"]), (64, ["reduce_rows"])):
        n = Steps(opset=23)
        _sum_of_products(n, n.input(np.zeros((rows, 1 << 14), np.float32)), n.input(np.zeros((rows, 1 << 14), np.float32)))
        assert families_of(n.proto(), tmp_path) == wanted


def test_a_launch_counts_all_that_it_reads_and_writes(tmp_path: Path) -> None:
    [launch] = launches_of(made(_skip_rms_norm).proto(), tmp_path)
    assert launch.bytes == 4 * (4 * 2 * 9 * 37 + 37)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_every_mode_gives_the_same_bits(precision: Any, tmp_path: Path) -> None:
    """In half, the norm reads the sum as it is stored. Weights between the norms are streamed while they compute."""
    n = Steps(opset=17)
    x, y = n.input(floats(24, 64)), n.input(floats(24, 64, seed=4))
    for at in range(3):
        total = n.step("Add", n.step("Softmax", x), y)
        x = n.step("LayerNormalization", total, n.constant(1 + 0.1 * floats(64)), n.constant(floats(64, seed=2)))
        y = n.step("Transpose", n.step("Tanh", total), perm=[1, 0])
        y = n.step(
            "MatMul", n.constant(0.1 * floats(24, 64, seed=at)), n.step("MatMul", y, n.constant(floats(24, 64, seed=at)))
        )
    n.node("Add", x, y)
    onnx.save(n.proto(), tmp_path / "m.onnx")
    device, path = QUICK_PLACES[0]
    wanted: dict[str, Any] = {"device": device.descriptor_name, "memory_path": path}
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b.flashmem", precision=precision, chunk="4KiB", **wanted)
    with flashmem.Session(bundle, device=device.descriptor_name, strategy="preload") as session:
        [resident] = session.run(None, n.feeds)
    [known] = by_runtime(n.proto(), n.feeds)
    np.testing.assert_allclose(resident, known, rtol=0, atol=(1e-5 if precision == "fp32" else 4e-3) * np.abs(known).max())
    for mode in descriptor_for(device).modes[path]:
        with flashmem.Session(bundle, device=device.descriptor_name, mode=mode) as session:
            assert np.array_equal(session.run(None, n.feeds)[0], resident), mode
