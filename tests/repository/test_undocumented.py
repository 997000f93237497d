"""Undocumented parts of other packages that flashmem uses: they exist, one module uses each, and versions are bounded."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import threading
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pyopencl
import pyopencl.invoker
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import flashmem
from flashmem.compiler.frontend import onnxscript_folding as folding
from flashmem.runtime.opencl import discovery, undocumented

ROOT = Path(flashmem.__file__).parents[1]

_ADAPTERS = {
    "flashmem/runtime/opencl/undocumented.py": r"\b(cl|pyopencl)\._|pyopencl\.invoker|\b_(set_arg|enqueue)_",
    "flashmem/compiler/frontend/onnxscript_folding.py": r"onnxscript\.\w*\.?_\w+|_constant_folding",
}
"""The one module that uses private names of a package, and a pattern of such a use."""


@pytest.mark.parametrize("adapter", sorted(_ADAPTERS))
def test_private_names_are_used_in_one_module(adapter: str) -> None:
    pattern = re.compile(_ADAPTERS[adapter])
    files = [*(ROOT / "flashmem").rglob("*.py"), *(ROOT / "profiler").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    users = {str(file.relative_to(ROOT)) for file in files if pattern.search(file.read_text(encoding="utf-8"))}
    assert users - {adapter} == set(), f"use {adapter} instead of private names in these files"
    assert adapter in users, f"{adapter} uses no private name any more: delete it and its tests"


_OPENCL, _FOLDING = sorted(_ADAPTERS, reverse=True)


def _gone(package: str, what: str, adapter: str) -> str:
    return f"{package} {metadata.version(package)} has no {what} that works as {adapter} expects: change one of them"


@pytest.mark.parametrize("name", ["_enqueue_write_buffer", "_enqueue_read_buffer", "_enqueue_write_image"])
def test_pyopencl_has_the_copies_without_checks(name: str) -> None:
    """`_cl` is compiled: its functions have a signature only in their docstring."""
    function = getattr(pyopencl._cl, name, None)
    assert callable(function), _gone("pyopencl", f"_cl.{name}", _OPENCL)
    assert "is_blocking" in (function.__doc__ or ""), _gone(
        "pyopencl", f"_cl.{name}(is_blocking=)", "runtime/opencl/undocumented.py"
    )


def test_pyopencl_names_its_compiled_module_and_its_switches() -> None:
    assert Path(pyopencl._cl.__file__).is_file(), _gone("pyopencl", "_cl.__file__", _OPENCL)
    assert hasattr(pyopencl.Kernel, "_set_arg_buf"), _gone("pyopencl", "Kernel._set_arg_buf", _OPENCL)


def test_pyopencl_writes_no_python_function_for_a_kernel_made_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyopencl looks up the function in its module for every kernel object, and accepts a pair in place of its own result."""
    what = _gone("pyopencl", "invoker.generate_enqueue_and_set_args", _OPENCL)
    assert hasattr(pyopencl.invoker, "generate_enqueue_and_set_args"), what
    written: list[int] = []
    real = pyopencl.invoker.generate_enqueue_and_set_args
    monkeypatch.setattr(
        pyopencl.invoker, "generate_enqueue_and_set_args", lambda *given, **named: (written.append(1), real(*given, **named))[1]
    )
    context = pyopencl.Context([discovery.find_device().handle])
    program = pyopencl.Program(context, "kernel void set(global int *x) { *x = 1; }").build()
    pyopencl.Kernel(program, "set")
    assert written, what
    written.clear()
    kernel = undocumented.new_kernel(program, "set")
    assert kernel.num_args == 1 and not written, what
    make = pyopencl.Kernel

    def beside(*given: Any) -> Any:
        other = threading.Thread(target=make, args=(program, "set"))
        other.start()
        other.join()
        return make(*given)

    with monkeypatch.context() as patch:
        patch.setattr(pyopencl, "Kernel", beside)
        undocumented.new_kernel(program, "set")
    assert len(written) == 1, "the kernel of another thread has its function"
    pyopencl.Kernel(program, "set")
    assert len(written) == 2


def test_pyopencl_looks_for_no_other_kernel_of_a_program_that_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does for its own `Program`, and takes what goes wrong there for an answer."""

    def interrupted(program: pyopencl.Program, name: str) -> Any:
        raise KeyboardInterrupt

    device = discovery.find_device().handle
    context = pyopencl.Context([device])
    binary = pyopencl.Program(context, "kernel void set(global int *x) { *x = 1; }").build().binaries[0]
    program = pyopencl.Program(context, [device], [binary]).build()
    monkeypatch.setattr(pyopencl.Program, "__getattr__", interrupted)
    assert undocumented.new_kernel(program, "set").num_args == 1
    with pytest.raises(pyopencl.LogicError):
        undocumented.new_kernel(program, "other")


_UNUSED = """
import sys, threading
from flashmem.runtime.opencl import discovery, undocumented

def imported():
    return sorted({"pyopencl.tools", "pyopencl.invoker"} & {*sys.modules})

assert not imported(), imported()
cl, device = discovery.cl, discovery.find_device().handle
program = cl._cl._Program(cl.Context([device]), b"kernel void set(global int *x) { *x = 1; }")
program._build(b"", [device])
undocumented.new_kernel(program, "set")
assert not imported(), imported()
make, kernels = cl.Kernel, []

def beside(*given):
    other = threading.Thread(target=lambda: kernels.append(make(program, "set")))
    other.start()
    other.join()
    return make(*given)

cl.Kernel = beside
undocumented.new_kernel(program, "set")
cl.Kernel = make
assert kernels[0].set_args and imported() == ["pyopencl.invoker", "pyopencl.tools"], imported()
assert cl.cltypes.float4.itemsize == 16
cl.Kernel(program, "set")
"""


def test_unused_modules_of_pyopencl_are_imported_for_those_who_use_them() -> None:
    done = subprocess.run([sys.executable, "-c", _UNUSED], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


def test_onnxscript_folds_as_the_importer_needs_it() -> None:
    """The pass has the parameters and the methods that flashmem calls and replaces."""
    of = folding.FoldConstantsPass
    made = set(inspect.signature(of).parameters)
    needed = {"shape_inference", "input_size_limit", "output_size_limit", "should_fold"}
    assert needed <= made, _gone("onnxscript", f"FoldConstantsPass({', '.join(sorted(needed - made))}=)", _FOLDING)
    called = list(inspect.signature(of.process_node).parameters)
    assert called == ["self", "node", "is_function"], _gone("onnxscript", "process_node(node, is_function)", _FOLDING)
    assert list(inspect.signature(of.call).parameters) == ["self", "model"], _gone("onnxscript", "call(model)", _FOLDING)
    fields = list(inspect.signature(folding.Replacement).parameters)
    assert fields == ["new_outputs", "new_nodes"], _gone("onnxscript", "Replacement(new_outputs, new_nodes)", _FOLDING)


def test_onnxscript_walks_in_order_and_folds_what_it_is_allowed_to() -> None:
    """Each node is processed once, after its inputs; `should_fold` decides; the result of `process_node` replaces the node."""
    seen: list[str | None] = []

    class Walk(folding.FoldConstantsPass):
        def process_node(self, node: ir.Node, is_function: bool) -> folding.Replacement | None:
            seen.append(node.op_type)
            return super().process_node(node, is_function)

    number = ir.Value(name="c", const_value=ir.tensor(np.float32(2)), shape=ir.Shape([]), type=ir.TensorType(ir.DataType.FLOAT))
    x = ir.Value(name="x", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.FLOAT))
    negated, absolute = ir.node("Neg", [number]), ir.node("Sqrt", [number])
    total = ir.node("Sum", [x, negated.outputs[0], absolute.outputs[0]])
    nodes = [negated, absolute, total]
    graph = ir.Graph([x], total.outputs, nodes=nodes, initializers=[number], opset_imports={"": 21}, name="g")
    walk = Walk(shape_inference=False, input_size_limit=0, output_size_limit=1, should_fold=lambda node: node.op_type == "Neg")
    result = walk(ir.Model(graph, ir_version=10))
    assert seen[:1] == ["Neg"] and seen[-2:] == ["Sqrt", "Sum"], _gone("onnxscript", "walk from inputs to outputs", _FOLDING)
    assert result.modified, _gone("onnxscript", "FoldConstantsResult.modified", _FOLDING)
    left = [node.op_type for node in graph if node.op_type != "Constant"]
    assert left == ["Sqrt", "Sum"], _gone("onnxscript", "FoldConstantsPass(should_fold=)", _FOLDING)
    folded = total.inputs[1]
    assert folded is not None and folded.const_value is not None and folded.const_value.numpy() == -2


@pytest.mark.parametrize(
    ("package", "file", "extra"),
    [
        ("pyopencl", "pyproject.toml", None),
        ("pyopencl", "packaging/runtime/pyproject.toml", None),
        ("onnxscript", "pyproject.toml", "compile"),
    ],
)
def test_versions_stop_before_the_next_series(package: str, file: str, extra: str | None) -> None:
    """A new series may lack the private names: it is permitted after these tests pass with it."""
    project = tomllib.loads((ROOT / file).read_text(encoding="utf-8"))["project"]
    needed = map(Requirement, project["dependencies"] if extra is None else project["optional-dependencies"][extra])
    (bounds,) = (each.specifier for each in needed if each.name == package)
    version = Version(metadata.version(package))
    following = f"{version.major + 1}.1" if version.major else f"0.{version.minor + 1}"
    assert str(version) in bounds, f"{file} does not allow {package} {version}, which is installed"
    assert following not in bounds, f"{file} allows {package} {following}, with which these tests never ran"
