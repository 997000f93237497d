"""Compiled kernels belong to an instruction set; entries that a driver refuses are built again."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import flashmem
from flashmem import Session
from flashmem.bundle.replacing import replace_binaries
from flashmem.program.kernel_text import kernel_texts
from flashmem.runtime.kernels.cache import CachedKernels, kernel_key
from flashmem.runtime.kernels.cache_files import ProgramCache, packed_entries, unpacked_entries
from flashmem.runtime.kernels.required import KernelLaunch, RequiredKernel
from flashmem.runtime.opencl import compile_target
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.discovery import find_device, list_devices
from tests.support.bundle_changes import rewrite

CPUS = [device.descriptor_name for device in list_devices() if device.kind == "cpu"]
FORCED = {"intel-cpu": {"CL_CONFIG_CPU_TARGET_ARCH": "core-avx2"}, "pocl": {"POCL_LLVM_CPU_NAME": "haswell"}}
"""Variables that make a runtime compile for an older processor."""

pytestmark = pytest.mark.build_apart

needs_avx2 = pytest.mark.skipif(
    platform.machine() != "x86_64" or "avx512f" not in Path("/proc/cpuinfo").read_text(), reason="no AVX-512 to go without"
)

_RUN = """
import json, sys
import numpy as np
from flashmem import Session
from flashmem.runtime.engine import opened
build, built = opened.build_apart, []
def counted(missing, *rest):
    built.extend(missing)
    return build(missing, *rest)
opened.build_apart = counted
with Session(sys.argv[1], device=sys.argv[2]) as session:
    answers = session.run(None, dict(np.load(sys.argv[3])))
np.savez(sys.argv[4], *answers)
print(json.dumps(len(built)))
"""


Array = np.ndarray[Any, Any]


def write_model(path: Path, *operators: str) -> tuple[dict[str, Array], Array]:
    """A product, and `operators` in sequence; returns inputs and the expected answer."""
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(shape, np.float32) for shape in ((40, 32), (32, 64)))
    y = x.astype(np.float64) @ weight
    for operator in operators:
        y = np.exp(y) / np.exp(y).sum(0) if operator == "Softmax" else 1 / (1 + np.exp(-y))
    names = ["product", *(f"v{index}" for index in range(len(operators) - 1)), "y"]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["product"])]
    for operator, source, target in zip(operators, names, names[1:], strict=False):
        attributes = {"axis": 0} if operator == "Softmax" else {}
        nodes.append(helper.make_node(operator, [source], [target], **attributes))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [40, 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [40, 64])],
        [numpy_helper.from_array(weight, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return {"x": x}, y


def built_by_run(bundle: Path, device: str, model: tuple[dict[str, Array], Array], **variables: str) -> int:
    """The number of kernels that a session in a new process builds; checks its answer."""
    inputs, expected = model
    given, answers = bundle.parent / "inputs.npz", bundle.parent / "answers.npz"
    np.savez(given, **inputs)
    command = [sys.executable, "-c", _RUN, str(bundle), device, str(given), str(answers)]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with np.load(answers) as found:
        np.testing.assert_allclose(found["arr_0"], expected, rtol=0, atol=1e-5)
    return int(json.loads(done.stdout))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProgramCache:
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("POCL_CACHE_DIR", str(tmp_path / "pocl"))
    return ProgramCache()


@needs_avx2
@pytest.mark.parametrize("device", CPUS)
def test_a_run_for_another_instruction_set_takes_no_binary_and_leaves_none(
    device: str, cache: ProgramCache, tmp_path: Path
) -> None:
    """A run of ViT-B/16 for AVX2 once made ResNet-50 fail permanently: some of its kernels were for AVX2, others not."""
    model = write_model(tmp_path / "m.onnx", "Softmax")
    one = flashmem.compile(tmp_path / "m.onnx", tmp_path / "one.flashmem", device=device, with_binaries=True)
    assert built_by_run(one.path, device, model, **FORCED[device]) > 0
    more = write_model(tmp_path / "n.onnx", "Softmax", "Sigmoid")  # its product is the same kernel
    other = flashmem.compile(tmp_path / "n.onnx", tmp_path / "other.flashmem", device=device, with_binaries=True)
    assert any(text in kernel_texts(one.source.plain).values() for text in kernel_texts(other.source.plain).values())
    assert built_by_run(other.path, device, more) == 0


def without_other_tiles(manifest: dict[str, Any]) -> None:
    """Remove the kernels for other tiles from a bundle, so that those for its own are compiled for every instruction set."""
    manifest["files"] = {name: entry for name, entry in manifest["files"].items() if ".avx" not in name}


@needs_avx2
@pytest.mark.skipif("intel-cpu" not in CPUS, reason="Intel's runtime takes code for other instruction sets")
@pytest.mark.parametrize("where", ["bundle", "cache"])
def test_code_for_another_instruction_set_under_this_ones_key_is_replaced(
    where: str, cache: ProgramCache, tmp_path: Path
) -> None:
    """Intel's runtime loads it, and then refuses all code for this processor."""
    device = "intel-cpu"
    model = write_model(tmp_path / "m.onnx", "Sigmoid", "Softmax")
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "m.flashmem", device=device, with_binaries=True)
    own = unpacked_entries(bundle.binaries or b"")
    rewrite(bundle.path, "manifest.json", without_other_tiles)
    built_by_run(bundle.path, device, model, **FORCED[device])
    foreign = {key: cache.read(key) or b"" for key in {path.stem for path in cache.folder.glob("*.bin")} - own.keys()}
    assert len(own) >= 2 and len(foreign) == len(own)
    name = bundle.program.launches[0].kernel.encode()  # it is loaded before the others
    (first,), (code,) = ([key for key in own if name in own[key]], [code for code in foreign.values() if name in code])
    if where == "bundle":
        bundle = replace_binaries(bundle, packed_entries({first: code}))
        cache.clear()
    else:
        bundle = replace_binaries(bundle, b"")
        cache.write(first, code)
    counts = [built_by_run(bundle.path, device, model) for _ in range(3)]
    assert counts[-1] == 0, f"what was refused is replaced, not built by each run: {counts}"


@pytest.mark.parametrize("device", CPUS)
@pytest.mark.parametrize("where", ["bundle", "cache"])
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("spoil", ["garbage", "another kernel", "other arguments"])
def test_a_binary_that_gives_no_kernel_is_built_again(
    device: str, where: str, apart: bool, spoil: str, cache: ProgramCache, tmp_path: Path
) -> None:
    context = Context(find_device(device))
    text = "__kernel void f(__global float* a) { a[get_global_id(0)] = get_global_id(0); }"
    wanted = RequiredKernel("f", text, (KernelLaunch(((64,), (1,)), ()),))
    texts = {
        "another kernel": "__kernel void g(__global float* a) { a[get_global_id(0)] = 2; }",
        "other arguments": "__kernel void f(__global float* a, int n) { a[get_global_id(0)] = n; }",
    }
    key = kernel_key(context.device, wanted, ())
    binary = context.build(texts[spoil], ()).binary() if spoil in texts else b"no program of any driver"
    if where == "cache":
        cache.write(key, binary)
    carried = packed_entries({key: binary}) if where == "bundle" else b""
    made: list[str] = []

    def build(missing: Mapping[str, RequiredKernel]) -> dict[str, bytes]:
        made.extend(missing)
        return {key: context.build(each.text, ()).binary() for key, each in missing.items()}

    opened = CachedKernels(cache, context, (), [wanted], carried, build if apart else None)
    memory, queue, found = context.buffer(256), context.queue(), np.empty(64, np.float32)
    for _ in range(2):
        queue.launch(queue.prepare(opened.kernel("f", [memory]), (64,), (1,)))
        queue.read(found, memory)
        assert found.tolist() == list(range(64))
    assert made == ([key] if apart else [])
    opened.save()
    assert cache.read(key) != binary


@pytest.mark.parametrize("device", CPUS)
def test_what_one_bundle_brings_is_not_given_to_another(device: str, cache: ProgramCache) -> None:
    """The binary of a bundle under the key of a kernel may be that of another kernel."""
    context = Context(find_device(device))
    wanted = RequiredKernel(
        "f", "__kernel void f(__global float* a) { a[get_global_id(0)] = 1; }", (KernelLaunch(((64,), (1,)), ()),)
    )
    key = kernel_key(context.device, wanted, ())
    evil = context.build("__kernel void f(__global float* a) { a[get_global_id(0)] = 666; }", ())
    memory, queue = context.buffer(256), context.queue()
    queue.launch(queue.prepare(evil.kernel("f", [memory]), (64,), (1,)))  # only then PoCL has compiled all of it
    queue.finish()
    carried, shared = packed_entries({key: evil.binary()}), dict[str, Any]()

    def answer(carried: bytes) -> float:
        opened, found = CachedKernels(cache, context, (), [wanted], carried, None, shared), np.empty(64, np.float32)
        queue.launch(queue.prepare(opened.kernel("f", [memory]), (64,), (1,)))
        queue.read(found, memory)
        opened.save()
        return float(found[0])

    assert answer(carried) == 666, "a bundle's binaries are its own"
    assert not cache.holds(key), "what a bundle brings is not kept"
    assert answer(b"") == 1
    assert answer(carried) == 1, "what was compiled here is preferred"


def test_the_key_tells_instruction_sets_and_variables_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pocl, intel = "Portable Computing Language", "Intel(R) OpenCL"
    processors = tmp_path / "cpuinfo"
    monkeypatch.setattr("flashmem.runtime.opencl.cpuinfo.CPUINFO", processors)
    told = set[str]()
    for flags in ("fpu avx2", "fpu avx2 avx512f", "fpu"):
        processors.write_text(f"processor\t: 0\nmodel name\t: AMD EPYC\ncpu MHz\t\t: 2600.1\nflags\t\t: {flags}\n" * 2)
        told.add(compile_target.compile_target(intel, "cpu", {}))
    assert len(told) == 3
    before = compile_target.compile_target(pocl, "cpu", {"CL_CONFIG_CPU_TARGET_ARCH": "skx", "PATH": "/bin"})
    processors.write_text(processors.read_text().replace("2600.1", "1400.7"))  # the clock rate does not matter
    assert compile_target.compile_target(pocl, "cpu", {"POCL_CACHE_DIR": "/x", "POCL_AFFINITY": "1"}) == before
    for variables in ({"POCL_WORK_GROUP_SPECIALIZATION": "0"}, {"POCL_WORK_GROUP_METHOD": "cbs"}, {"POCL_NEW": "1"}):
        told.add(compile_target.compile_target(pocl, "cpu", variables))
    assert len(told) == 6 and before not in told
    assert compile_target.compile_target("NVIDIA CUDA", "gpu", {"POCL_NEW": "1"}) == ""
    device = list_devices()[0]
    wanted = RequiredKernel("f", "__kernel void f() {}", ())
    assert kernel_key(device, wanted, ()) != kernel_key(replace(device, target="another"), wanted, ())


@pytest.mark.parametrize("device", CPUS)
def test_children_start_a_driver_as_this_process_did(
    device: str, cache: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that is set after the start of the driver changes nothing, here or in the children."""
    inputs, _ = write_model(tmp_path / "m.onnx", "Sigmoid")
    find_device(device)
    for name, value in FORCED[device].items():
        monkeypatch.setenv(name, value)
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "m.flashmem", device=device)
    keys = {path.stem for path in cache.folder.glob("*.bin")}
    assert len(keys) == len(kernel_texts(bundle.source.plain).keys() & set(bundle.source.kernels))
    with Session(bundle, device=device) as session:
        session.run(None, inputs)
    assert {path.stem for path in cache.folder.glob("*.bin")} == keys
