"""Page sizes of 4, 16 and 64 KiB: mapping, dropping, copying, accounting, and the layout of weight files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import flashmem
from flashmem.base import pages
from flashmem.base.errors import BundleError, UserError
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.validation import check_bundle
from flashmem.planning.memory.layout import lay_out_pools
from flashmem.runtime.memory.arena import move_out, new_pages
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.streaming.weight_file import WeightFile
from flashmem.schedule.loads import segments
from flashmem.target.descriptor import descriptor_names, load_descriptor
from tests.support.mini_bundle import MiniModel, write_mini_bundle
from tests.support.paths import DATA

CPUS = [str(number) for number, device in enumerate(list_devices()) if device.kind == "cpu"]


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> MiniModel:
    return write_mini_bundle(tmp_path_factory.mktemp("mini") / "m.flashmem")


@pytest.fixture
def large_pages(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv(pages.VARIABLE, "16384")
    return 16384


@pytest.mark.parametrize("asked", ["0", "5000", "2048", "1048576", "many", "-4096"])
def test_only_a_page_size_is_one(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv(pages.VARIABLE, asked)
    with pytest.raises(UserError, match="name a power of two"):
        pages.page_size()


def test_a_phone_s_weights_lie_on_pages_of_16_kib(tmp_path: Path) -> None:
    for name in descriptor_names():
        assert load_descriptor(name).page_bytes == (16384 if name.startswith(("adreno", "mali", "generic-gpu")) else 4096), name
    bundle = flashmem.compile(DATA / "gptneo-tiny.onnx", tmp_path / "m.flashmem", device="adreno750", build=False)
    assert bundle.program.page_bytes == 16384
    offsets = [part.offset for part in bundle.program.slices] + [bundle.program.constants_offset]
    assert any(offset % 4096 == 0 for offset in offsets) and all(offset % 16384 == 0 for offset in offsets)
    for gather in bundle.program.host_embeddings:
        assert gather.offset % 16384 == 0


def test_rows_of_a_table_are_not_torn_apart_by_larger_pages(tmp_path: Path) -> None:
    """Rows of 3 bytes: 4,096 of them fill whole pages of 4 KiB, but not of 16 KiB."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    table = np.random.default_rng(0).integers(-100, 100, (400_000, 3)).astype(np.int8)
    node = helper.make_node("Gather", ["t", "i"], ["y"], axis=0)
    kinds = {"i": (TensorProto.INT64, (5,)), "y": (TensorProto.INT8, (5, 3))}
    ports = [helper.make_tensor_value_info(name, *kind) for name, kind in kinds.items()]
    graph = helper.make_graph([node], "g", ports[:1], ports[1:], [numpy_helper.from_array(table, "t")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "m.onnx")
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "m.flashmem", device="mali-g715", build=False)
    (gather,) = bundle.program.host_embeddings
    content = bundle.weights_path.read_bytes()[gather.offset :][: table.nbytes]
    assert np.array_equal(np.frombuffer(content, np.int8).reshape(table.shape), table)


def test_a_mapped_bundle_counts_whole_pages(mini: MiniModel) -> None:
    bundle = mini.open()
    small, large = (
        lay_out_pools(bundle.program.slices, bundle.plan, ["map", "dma"], page_bytes=page) for page in (4096, 65536)
    )
    assert large["map"].mapped_peak_bytes > small["map"].mapped_peak_bytes
    assert large["map"].mapped_peak_bytes % 65536 == 0 and large["map"].resident_bytes % 16384 == 0
    assert large["dma"] == small["dma"], "pools are no pages"


def test_pages_are_whole_in_every_step(large_pages: int, mini: MiniModel, tmp_path: Path) -> None:
    part = replace(mini.open().program.slices[0], offset=0, nbytes=9 << 20)
    assert all(segment.first % large_pages == 0 for segment in segments(part, "map"))
    arena = new_pages(5 * large_pages)
    assert arena.nbytes % large_pages == 0
    arena[:] = 7
    (moved,) = move_out(arena, [(large_pages + 512, 1024)])
    assert (moved == 7).all() and (arena[:large_pages] == 7).all()
    file = tmp_path / "w.bin"
    file.write_bytes(bytes(range(256)) * 512)
    weights = WeightFile(file, 131072)
    weights.populate(large_pages, 5000)
    weights.drop(large_pages, 5000)
    assert weights.mapped[large_pages + 1] == 1
    weights.close()


def test_a_bundle_of_smaller_pages_than_the_system_s_is_not_mapped(large_pages: int, mini: MiniModel) -> None:
    inputs = mini.inputs()
    with flashmem.Session(mini.path, device=CPUS[0]) as session:
        assert session.mode != "map"
        np.testing.assert_allclose(session.run(None, inputs)[0], mini.reference(inputs)[0], rtol=0, atol=2e-5)
    with pytest.raises(UserError, match="its weights are in pages of 4096 bytes, and this system has pages of 16384"):
        flashmem.Session(mini.path, device=CPUS[0], mode="map")


def test_a_bundle_of_the_system_s_pages_is_mapped(large_pages: int, tmp_path: Path) -> None:
    bundle = flashmem.compile(DATA / "resnet-tiny.onnx", tmp_path / "m.flashmem", device=CPUS[0], budget="16MB", build=False)
    assert (bundle.program.page_bytes, bundle.meta["mode"]) == (16384, "map")
    rng = np.random.default_rng(0)
    inputs = {port.name: rng.standard_normal(port.shape).astype(port.dtype) for port in bundle.program.inputs}
    answers = []
    for mode in ("map", "dma"):
        with flashmem.Session(bundle, device=CPUS[0], mode=mode) as session:  # type: ignore[arg-type]
            answers.append([session.run(None, inputs)[0] for _ in range(2)])
    assert all(np.array_equal(answers[0][0], other) for each in answers for other in each)


@pytest.mark.parametrize("page", [0, 1, 5000, 1 << 30])
def test_a_bundle_of_no_pages_is_refused(mini: MiniModel, page: int) -> None:
    bundle = Bundle.open(mini.path)
    with pytest.raises(BundleError, match="laid out in no pages"):
        check_bundle(replace(bundle.program, page_bytes=page), bundle.plan)


def test_a_descriptor_of_no_pages_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('name = "x"\npage_bytes = 5000\n[rates.contention]\nmap=1\ndma=1\nalias=1\ninterleave=1\n')
    with pytest.raises(UserError, match="page_bytes is 5000"):
        load_descriptor(str(tmp_path / "x.toml"))
