"""One bundle for all CPUs: the code for another instruction set reads the same weights and gives right answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashmem
from flashmem.base.errors import BudgetError, BundleError
from flashmem.base.types import MemoryPath
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.manifest import instruction_set_files
from flashmem.bundle.replacing import replace_plan
from flashmem.program.launches import Launch
from flashmem.target.descriptor import load_descriptor
from flashmem.target.instruction_set import INSTRUCTION_SETS, other_tiles, same_tile
from tests.runtime.opencl.test_compile_target import FORCED, needs_avx2, write_model
from tests.support.bundle_changes import files_of, rewrite
from tests.support.compared import DEVICES, Nodes, require_right
from tests.support.inputs import floats

pytestmark = pytest.mark.filterwarnings("ignore:.*was compiled for a processor with")
"""One code after another runs on this processor."""

CPUS = [device for device, _ in DEVICES if load_descriptor(device).kind == "cpu"]
PLACES: list[tuple[str, MemoryPath]] = [(device, path) for device in CPUS for path in load_descriptor(device).memory_paths]


def model() -> Nodes:
    """Products, convolutions with and without groups, attention and a norm: odd numbers of panels, and one that is not full."""
    nodes = Nodes()
    tokens = nodes.input(floats(2, 19, 52, kind="of many sizes"))
    wide = nodes.node("MatMul", tokens, nodes.constant(floats(52, 168)))
    nodes.node("Add", *nodes.node("MatMul", *wide, nodes.constant(floats(168, 52))), tokens)
    nodes.node("LayerNormalization", tokens, nodes.constant(floats(52)), nodes.constant(floats(52)))
    nodes.node("MatMul", nodes.input(floats(1, 71, kind="positive")), nodes.constant(floats(71, 36)))
    nodes.node("MatMul", nodes.input(floats(3, 2, 9, 20)), nodes.input(floats(2, 20, 12)))
    image = nodes.input(floats(1, 16, 13, 11, kind="around 1e3"))
    nodes.node("Conv", image, nodes.constant(floats(40, 16, 3, 3)), pads=[1] * 4)
    nodes.node("Conv", image, nodes.constant(floats(24, 4, 3, 3)), group=4, strides=[2, 1])
    nodes.node("ConvTranspose", image, nodes.constant(floats(16, 37, 4, 4)), strides=[2, 2])
    return nodes


def slices_of(launch: Launch) -> set[object]:
    return {arg.value for arg in launch.args if arg.kind == "slice"}


def compiled(folder: Path, device: str, **options: Any) -> tuple[Bundle, Nodes]:
    nodes, file = model(), folder / "m.onnx"
    file.write_bytes(nodes.proto().SerializeToString())
    return flashmem.compile(file, folder / "m.flashmem", device=device, build=False, **options), nodes


@pytest.mark.parametrize("optimize", ["cold", "steady"])
@pytest.mark.parametrize(("device", "path"), PLACES)
def test_code_for_another_instruction_set(device: str, path: MemoryPath, optimize: str, tmp_path: Path) -> None:
    bundle, nodes = compiled(tmp_path, device, memory_path=path, optimize=optimize)
    for name in other_tiles(bundle.descriptor.instruction_set):
        other = bundle.for_instruction_set(name)
        assert same_tile(other.descriptor.instruction_set, name)
        pairs = list(zip(bundle.program.launches, other.program.launches, strict=True))
        assert sum(one.kernel != two.kernel for one, two in pairs) >= 5, "their tiles differ"
        assert all(slices_of(one) == slices_of(two) for one, two in pairs)
        for mode in load_descriptor(device).modes[path]:
            with flashmem.Session(other, device=device, mode=mode) as session:
                for _ in range(2):  # with the kernels of later runs, too
                    require_right(nodes.proto(), nodes.feeds, session.run(None, nodes.feeds))
                    session.prepared()


@pytest.mark.parametrize("device", CPUS[:1])
def test_slices_of_few_panels(device: str, tmp_path: Path) -> None:
    """In the smallest budget a slice may have one panel, which has no neighbour to read."""
    with pytest.raises(BudgetError) as refused:
        compiled(tmp_path, device, budget=1)
    bundle, nodes = compiled(tmp_path, device, budget=refused.value.smallest_bytes)
    assert any(launch.name.endswith("[1]") for launch in bundle.program.launches)
    for name in ("", *other_tiles(bundle.descriptor.instruction_set)):
        with flashmem.Session(bundle.for_instruction_set(name), device=device) as session:
            require_right(nodes.proto(), nodes.feeds, session.run(None, nodes.feeds))


@needs_avx2
@pytest.mark.build_apart
@pytest.mark.parametrize("device", [device for device in CPUS if device in FORCED])
def test_a_bundle_runs_its_other_code_where_kernels_are_compiled_for_another_set(device: str, tmp_path: Path) -> None:
    inputs, expected = write_model(tmp_path / "m.onnx", "Softmax")
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "m.flashmem", device=device)
    np.savez(tmp_path / "in.npz", **inputs)
    command = [sys.executable, "-c", _RUN, str(bundle.path), device, str(tmp_path / "in.npz"), str(tmp_path / "out.npz")]
    done = subprocess.run(command, env={**os.environ, **FORCED[device]}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["avx2", bundle.for_instruction_set("avx2").program.launches[0].kernel]
    np.testing.assert_allclose(np.load(tmp_path / "out.npz")["arr_0"], expected, rtol=0, atol=1e-5)


_RUN = """
import sys, warnings
import numpy as np
import flashmem
from flashmem.base.errors import FlashmemWarning
warnings.simplefilter("error", FlashmemWarning)
with flashmem.Session(sys.argv[1], device=sys.argv[2]) as session:
    np.savez(sys.argv[4], *session.run(None, dict(np.load(sys.argv[3]))))
    print(session.bundle.descriptor.instruction_set, session.bundle.program.launches[0].kernel)
"""


@pytest.mark.parametrize("device", CPUS[:1])
def test_the_sets_that_a_bundle_is_for(device: str, tmp_path: Path) -> None:
    bundle, _ = compiled(tmp_path, device)
    own = bundle.descriptor.instruction_set
    assert bundle.for_instruction_set("") is bundle and bundle.for_instruction_set(own) is bundle
    for name in INSTRUCTION_SETS:
        found = bundle.for_instruction_set(name).descriptor.instruction_set
        assert same_tile(found, name) or (name == "sse" and found == own)
    [stored] = other_tiles(own)
    copied = replace_plan(bundle, bundle.plan, bundle.meta, tmp_path / "copied.flashmem")
    assert copied.for_instruction_set(stored).program == bundle.for_instruction_set(stored).program


@pytest.mark.skipif(not CPUS, reason="no CPU runtime here")
def test_damaged_code_is_refused(tmp_path: Path) -> None:
    bundle, _ = compiled(tmp_path, CPUS[0])
    [stored] = other_tiles(bundle.descriptor.instruction_set)
    program, plain, _ = instruction_set_files(0, stored)
    content = (files_of(bundle.path) / plain).read_bytes()
    (files_of(bundle.path) / plain).write_bytes(content[:-1])
    with pytest.raises(BundleError, match=f"{plain} is not what was written; compile the model again"):
        bundle.for_instruction_set(stored)
    (files_of(bundle.path) / plain).write_bytes(content)
    rewrite(bundle.path, program, lambda data: data.update(arena_bytes=data["arena_bytes"] + 64))
    with pytest.raises(BundleError, match="its programs for other instruction sets use other memory"):
        Bundle.open(bundle.path).for_instruction_set(stored)


def test_a_gpu_has_one_code(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(model().proto().SerializeToString())
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "m.flashmem", device="adreno740", build=False)
    assert not [each.name for each in bundle.files.iterdir() if ".avx" in each.name]
    assert bundle.for_instruction_set("avx2") is bundle


@pytest.mark.skipif(not CPUS, reason="no CPU runtime here")
def test_a_variant_that_needs_no_other_code_keeps_its_own(tmp_path: Path) -> None:
    """Whichever of the variants that is."""
    nodes = Nodes()
    nodes.node("MatMul", nodes.input(floats(19, 52)), nodes.constant(floats(52, 168)))
    proto = nodes.proto()
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    bundle = flashmem.compile(
        tmp_path / "m.onnx", tmp_path / "m.flashmem", device=CPUS[0], build=False, shapes=[{"x0": (19, 52)}, {"x0": (7, 52)}]
    )
    [stored] = other_tiles(bundle.descriptor.instruction_set)
    absent = instruction_set_files(0, stored)
    rewrite(bundle.path, "manifest.json", lambda manifest: [manifest["files"].pop(name) for name in absent])
    first, second = Bundle.open(bundle.path).for_instruction_set(stored).variants
    assert first.program == bundle.variants[0].program
    assert second.program != bundle.variants[1].program
