"""Kernels under Oclgrind, which simulates a device and reports races between work-items and accesses outside a buffer.

With the tiles of a GPU (work-groups, local memory) and the interleaved copy stream, whose races no CPU runtime would show.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import flashmem
from flashmem.program.kernel_text import kernel_texts
from tests.support.attention_cases import Model, capped, causal, few_masked, plain, standard_masked
from tests.support.paths import ROOT

LIBRARIES = sorted(Path("/usr/lib").glob("**/oclgrind/liboclgrind-rt-icd.so"))
SCRIPT = """
import sys
import numpy as np, onnxruntime
import flashmem
model, path, mode, folder, device, precision = sys.argv[1:]
bundle = flashmem.compile(
    model, folder + "/m.flashmem", device=device, memory_path=path, mode=mode, chunk="4KiB",
    precision=precision,
)
generator = np.random.default_rng(0)
inputs = {
    port.name: generator.integers(0, 90, port.shape)
    if "int" in port.dtype
    else generator.random(port.shape) < 0.3
    if port.dtype == "bool"
    else generator.standard_normal(port.shape, port.dtype)
    for port in bundle.program.inputs
}
with flashmem.Session(bundle, device="oclgrind", mode=mode) as session:
    outputs = session.run(None, inputs)
for answer, expected in zip(outputs, onnxruntime.InferenceSession(model).run(None, inputs), strict=True):
    assert np.abs(answer - expected).max() <= {"fp32": 1e-3, "fp16": 1e-2}[precision] * np.ptp(expected)
print("answered", flush=True)
"""
_TRIES = 3


RACY = """
import numpy as np, pyopencl as cl
context = cl.Context(cl.get_platforms()[0].get_devices())
queue = cl.CommandQueue(context)
y = cl.Buffer(context, cl.mem_flags.READ_WRITE, 16)
program = cl.Program(context, "__kernel void k(__global int* y) { y[0] = get_global_id(0); y[get_global_id(0)] = 1; }").build()
program.k(queue, (8,), (8,), y)
queue.finish()
"""


def _run(script: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `script` in a process with Oclgrind's device only.

    Oclgrind has no locks, and a loader thread writes while kernels run: about one process in 150 dies of a signal inside it.
    Such a process is started again, a few times at most. The result of a process that answers or complains is final.
    """
    vendors = folder / "vendors"
    vendors.mkdir()
    (vendors / "oclgrind.icd").write_text(f"{LIBRARIES[0]}\n")
    settings = {
        "OCL_ICD_VENDORS": str(vendors),
        "OCLGRIND_DATA_RACES": "1",
        "OCLGRIND_LOCAL_MEM_SIZE": "49152",
        "FLASHMEM_CACHE_DIR": str(folder / "cache"),
    }
    command = [sys.executable, "-X", "faulthandler", "-W", "ignore", "-c", script, *arguments]
    for _ in range(_TRIES):
        done = subprocess.run(command, env=os.environ | settings, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode >= 0 or "answered" in done.stdout:
            break
    return done


def _complains(done: subprocess.CompletedProcess[str]) -> bool:
    return "Invalid" in done.stderr or "race" in done.stderr.lower()


needs_oclgrind = pytest.mark.skipif(not LIBRARIES, reason="oclgrind is not installed")


@needs_oclgrind
def test_a_race_would_be_seen(tmp_path: Path) -> None:
    assert _complains(_run(RACY, tmp_path))


@needs_oclgrind
@pytest.mark.parametrize("path", [pytest.param("buffer", marks=pytest.mark.thorough), "texture"])
def test_what_is_written_over_an_operand_is_no_race(path: str, tmp_path: Path) -> None:
    model = tmp_path / "m.onnx"
    onnx.save(_overwriting(), model)
    bundle = flashmem.compile(model, tmp_path / "seen", device="nvidia", memory_path=path, build=False)  # type: ignore[arg-type]
    over = {kernel.partition("_")[0] for kernel, text in kernel_texts(bundle.source.plain).items() if "//@ over" in text}
    assert over == {"elementwise", "matmul", "reduce"}, over
    done = _run(SCRIPT, tmp_path, str(model), path, "interleave", str(tmp_path), "devices/nvidia.toml", "fp32")
    assert done.stdout.strip() == "answered", f"exit {done.returncode}: {done.stderr}"
    assert not _complains(done), done.stderr


def _overwriting() -> onnx.ModelProto:
    """A model in which wide activations die when others are created; nothing else in it is large."""
    generator = np.random.default_rng(0)
    weights = {f"w{i}": generator.standard_normal(shape) for i, shape in enumerate([(64, 4), (4, 64), (4, 64), (64, 4)])}
    nodes = [
        ("Neg", ["x"], "a"), ("MatMul", ["a", "w0"], "b"), ("MatMul", ["b", "w1"], "c"), ("Softmax", ["c"], "d"),
        ("MatMul", ["b", "w2"], "e"), ("Add", ["e", "d"], "f"), ("Softmax", ["f"], "g"), ("MatMul", ["g", "w3"], "y"),
    ]  # fmt: skip
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(op, read, [made], made, **({"axis": 0} if made == "g" else {})) for op, read, made in nodes],
        "overwriting",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (69, 64))],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (69, 4))],
        [onnx.numpy_helper.from_array(data.astype(np.float32), name) for name, data in weights.items()],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)


@needs_oclgrind
@pytest.mark.parametrize(
    ("model", "path", "precision"),
    [
        ("regnet-tiny", "buffer", "fp32"),
        *(
            pytest.param(model, path, "fp32", marks=pytest.mark.thorough)  # each takes half a minute of a processor
            for model in ("gptneo-tiny", "regnet-tiny", "vit-tiny")
            for path in ("buffer", "texture")
            if (model, path) != ("regnet-tiny", "buffer")
        ),
        pytest.param("gptneo-tiny", "texture", "fp16", marks=pytest.mark.thorough),
    ],
)
def test_no_race_and_nothing_out_of_bounds(model: str, path: str, precision: str, tmp_path: Path) -> None:
    done = _run(
        SCRIPT,
        tmp_path,
        str(ROOT / f"tests/data/{model}.onnx"),
        path,
        "interleave",
        str(tmp_path),
        "devices/nvidia.toml",
        precision,
    )
    assert done.stdout.strip() == "answered", f"exit {done.returncode}: {done.stderr}"
    assert not _complains(done), done.stderr


@needs_oclgrind
@pytest.mark.parametrize(("device", "precision"), [("generic-cpu", "fp16"), ("nvidia", "fp32")])
def test_attention_of_few_and_of_many_queries(device: str, precision: str, tmp_path: Path) -> None:
    model = Model()
    for rows, keys, size, value_size in ((1, 150, 20, 9), (3, 70, 8, 8), (19, 37, 40, 8), (70, 5, 6, 3)):
        plain(model, 1, 2, rows, keys, size, value_size)
    for form in (capped, causal, few_masked, standard_masked):
        form(model)
    onnx.save(model.proto(), tmp_path / "attention.onnx")
    path = "buffer" if device == "generic-cpu" else "texture"
    there = f"devices/{device}.toml"
    done = _run(SCRIPT, tmp_path, str(tmp_path / "attention.onnx"), path, "interleave", str(tmp_path), there, precision)
    assert done.stdout.strip() == "answered", f"exit {done.returncode}: {done.stderr}"
    assert not _complains(done), done.stderr


@needs_oclgrind
@pytest.mark.parametrize("path", ["buffer", "texture"])
def test_convolutions_by_winograd(path: str, tmp_path: Path) -> None:
    """Two convolutions in sequence: odd sizes, channels that fill no vector, tiles that fill no work-item or group."""
    random = np.random.default_rng(0)
    weights = {f"w{i}": random.standard_normal(shape) for i, shape in enumerate([(10, 5, 3, 3), (7, 10, 3, 3)])}
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Conv", ["x", "w0"], ["a"], pads=[1, 0, 2, 1]),
            onnx.helper.make_node("Relu", ["a"], ["b"]),
            onnx.helper.make_node("Conv", ["b", "w1"], ["y"]),
        ],
        "winograd",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (2, 5, 7, 6))],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(data.astype(np.float32), name) for name, data in weights.items()],
    )
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m.onnx"
    )
    config: dict[str, object] = {"kind": "winograd", "name": "it", "rows": 3, "columns": 8, "vector": 4, "channels": 4}
    if path == "texture":
        config = {"kind": "staged-winograd", "name": "it", "rows": 4, "columns": 8, "local_size": [2, 1], "channels": 4}
    there = tmp_path / "device.toml"
    there.write_text(
        'only = "it"\n' + (ROOT / "devices/generic-cpu.toml").read_text() + "\n[[configs]]\n"
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items())
    )  # fmt: skip
    seen = flashmem.compile(tmp_path / "m.onnx", tmp_path / "seen", device=str(there), memory_path=path, build=False)  # type: ignore[arg-type]
    assert [launch.kernel.partition("_")[0] for launch in seen.program.launches].count("winograd") == 2
    done = _run(SCRIPT, tmp_path, str(tmp_path / "m.onnx"), path, "interleave", str(tmp_path), str(there), "fp32")
    assert done.stdout.strip() == "answered", f"exit {done.returncode}: {done.stderr}"
    assert not _complains(done), done.stderr


@needs_oclgrind
@pytest.mark.parametrize("device", ["generic-cpu", "nvidia"])
def test_selected_boxes(device: str, tmp_path: Path) -> None:
    """Work-items of a GPU share a row of boxes: each reads the flags that others have set before a barrier."""
    text = """
    <ir_version: 10, opset_import: ["" : 17]>
    detect (float[2, 45, 4] boxes, float[2, 3, 45] scores) => (int64[n, 3] selected, float[n] certainty)
    <int64[1] most = {20}, float[1] overlap = {0.2}>
    {
        selected = NonMaxSuppression (boxes, scores, most, overlap)
        certainty = GatherND (scores, selected)
    }
    """
    onnx.save(onnx.parser.parse_model(text), tmp_path / "boxes.onnx")
    path = "buffer" if device == "generic-cpu" else "texture"
    words = (str(tmp_path / "boxes.onnx"), path, "interleave", str(tmp_path), f"devices/{device}.toml", "fp32")
    done = _run(SCRIPT, tmp_path, *words)
    assert done.stdout.strip() == "answered", f"exit {done.returncode}: {done.stderr}"
    assert not _complains(done), done.stderr
