"""Bundles: atomic writes; a tampered or truncated bundle is refused before any read out of bounds."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashmem.bundle.bundle
import flashmem.bundle.version_directories
from flashmem.base.errors import BundleError, MissingFileError, UserError
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.manifest import FORMAT_VERSION
from flashmem.bundle.writer import BundleWriter
from flashmem.target.descriptor import DeviceDescriptor
from tests.support.bundle_changes import files_of, fit, rewrite
from tests.support.mini_bundle import MiniModel, write_mini_bundle

Json = dict[str, Any]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> MiniModel:
    return write_mini_bundle(tmp_path_factory.mktemp("bundle") / "m.flashmem", budget=1_000_000)


@pytest.fixture(scope="module")
def textured(tmp_path_factory: pytest.TempPathFactory) -> MiniModel:
    return write_mini_bundle(tmp_path_factory.mktemp("bundle") / "t.flashmem", "texture")


@pytest.fixture
def model(written: MiniModel, tmp_path: Path) -> MiniModel:
    shutil.copytree(written.path, tmp_path / "m.flashmem")
    return MiniModel(tmp_path / "m.flashmem", written.table, written.weights, written.biases)


def test_what_was_written_is_read(model: MiniModel) -> None:
    bundle = Bundle.open(model.path)
    assert bundle.budget_bytes == 1_000_000
    assert bundle.meta["model"] == "mini"
    assert bundle.descriptor.name == "mini"
    assert bundle.program.to_json() == Bundle.open(str(model.path)).program.to_json()
    assert "matvec" in bundle.source.plain and "lane_first" in bundle.source.lane
    assert bundle.weights_path.stat().st_size == bundle.program.weights_bytes
    bundle.verify_weights()
    assert sorted(path.name for path in bundle.files.iterdir()) == [
        "checksums.bin", "kernels.cl", "kernels_lane.cl", "plan.json", "program.json", "weights.bin",
    ]  # fmt: skip
    assert sorted(path.name for path in model.path.iterdir()) == sorted(["manifest.json", bundle.files.name])


def test_weights_that_changed_are_found_when_asked(model: MiniModel) -> None:
    bundle = Bundle.open(model.path)
    with bundle.weights_path.open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))
    Bundle.open(model.path)
    with pytest.raises(BundleError, match=r"weights\.bin is damaged: the table read by 'tokens' is not what was written"):
        bundle.verify_weights()


def test_appended_data_is_aligned_and_whole(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "w.flashmem") as writer:
        assert writer.append(b"abc") == 0
        assert writer.append(np.arange(6, dtype=np.float32).reshape(2, 3).T, 64) == 64
        assert writer.append(b"", 128) == 128
        assert writer.append(np.array(7, np.int16)) == 128
        assert writer.size == 130
        (part,) = tmp_path.glob(".w.flashmem-*/*/weights.bin")
        content = part.read_bytes()
    assert content[:64] == b"abc" + bytes(61)
    assert content[64:88] == np.array([0, 3, 1, 4, 2, 5], np.float32).tobytes()
    assert content[88:] == bytes(40) + np.array(7, np.int16).tobytes()
    assert list(tmp_path.iterdir()) == []  # never committed


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="packing failed"), BundleWriter(tmp_path / "w.flashmem") as writer:
        writer.append(b"abc")
        raise RuntimeError("packing failed")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_while_appending_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"the disk is full, so .*w\.flashmem was not written"),
        BundleWriter(tmp_path / "w.flashmem") as writer,
    ):
        writer._weights.close()
        writer._weights = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 - the writer closes it
        writer.append(bytes(100))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_at_the_end_keeps_the_older_bundle(model: MiniModel, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in model.path.rglob("*.*")}

    def full(path: Path, content: bytes) -> None:
        with Path("/dev/full").open("wb") as file:
            file.write(content)

    monkeypatch.setattr(flashmem.bundle.version_directories, "_write", full)
    with pytest.raises(UserError, match="the disk is full"):
        write_mini_bundle(model.path)
    assert {path.name: path.read_bytes() for path in model.path.rglob("*.*")} == before
    assert list(model.path.parent.iterdir()) == [model.path]


def test_a_new_bundle_replaces_an_older_one(model: MiniModel) -> None:
    write_mini_bundle(model.path, preload=3, budget=5)
    assert Bundle.open(model.path).budget_bytes == 5
    assert list(model.path.parent.iterdir()) == [model.path]


def test_what_is_no_bundle_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/diary.txt").write_text("dear diary")
    for name in ("notes", "notes/diary.txt"):
        with pytest.raises(UserError, match="exists and is not a bundle"):
            BundleWriter(tmp_path / name)
    assert (tmp_path / "notes/diary.txt").read_text() == "dear diary"


def test_a_place_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        BundleWriter(tmp_path / "file/model.flashmem")


def test_no_bundle_and_no_folder_are_reported(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="does not exist"):
        Bundle.open(tmp_path / "none.flashmem")
    (tmp_path / "file").write_text("not a bundle")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(BundleError, match="is not a bundle"):
            Bundle.open(path)
    model = tmp_path / "model.onnx"
    model.write_bytes(b"")
    with pytest.raises(BundleError, match="is an ONNX file, not a bundle; make one of it with flashmem compile"):
        Bundle.open(model)


@pytest.mark.parametrize("name", ["program.json", "plan.json", "kernels.cl", "kernels_lane.cl", "checksums.bin", "weights.bin"])
@pytest.mark.parametrize("how", ["missing", "truncated", "longer"])
def test_a_damaged_file_is_found(name: str, how: str, model: MiniModel) -> None:
    path = files_of(model.path) / name
    if how == "missing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size + (1 if how == "longer" else -1))
    with pytest.raises(BundleError, match=rf"{name}.*compile the model again"):
        Bundle.open(model.path)


def test_another_format_version_is_reported(model: MiniModel) -> None:
    rewrite(model.path, "manifest.json", lambda manifest: manifest.update(format_version=99))
    with pytest.raises(BundleError, match="format version 99"):
        Bundle.open(model.path)


def test_a_bundle_of_format_1_is_told_and_replaced(tmp_path: Path) -> None:
    old = tmp_path / "old.flashmem"
    old.mkdir()
    files = {name: b"{}" for name in ("program.json", "plan.json", "kernels.cl", "kernels_lane.cl")}
    entries = {name: {"nbytes": 2, "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()}
    manifest = {
        "format_version": 1, "flashmem_version": "0.1.0", "files": entries, "weights": {"nbytes": 3, "sha256": ""},
        "device": {}, "meta": {},
    }  # fmt: skip
    for name, content in {**files, "weights.bin": b"abc", "manifest.json": json.dumps(manifest).encode()}.items():
        (old / name).write_bytes(content)
    with pytest.raises(
        BundleError, match=rf"has format version 1, this flashmem reads {FORMAT_VERSION}; compile the model again$"
    ):
        Bundle.open(old)
    write_mini_bundle(old)
    assert sorted(path.name for path in old.iterdir()) == sorted(["manifest.json", Bundle.open(old).files.name])


@pytest.mark.parametrize("key", ["version_directory", "files", "weights", "device", "meta", "flashmem_version", "checksum"])
def test_a_manifest_that_changed_is_found(key: str, model: MiniModel) -> None:
    path = model.path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest[key] = {"changed": 1} if isinstance(manifest[key], dict) else "0" * 16
    path.write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"manifest\.json is not what was written"):
        Bundle.open(model.path)


@pytest.mark.parametrize("version", ["", "..", "/etc", "0123456789abcdeg", 7])
def test_a_manifest_names_nothing_outside(version: object, model: MiniModel) -> None:
    rewrite(model.path, "manifest.json", lambda manifest: manifest.update(version_directory=version))
    with pytest.raises(BundleError, match=r"lacks 'version_directory'|names no folder"):
        Bundle.open(model.path)


@pytest.mark.parametrize(("key", "value"), [("session_seconds", "soon"), ("disk_bandwidth", None)])
def test_a_device_of_other_types_is_refused(key: str, value: object, model: MiniModel) -> None:
    rewrite(model.path, "manifest.json", lambda manifest: manifest["device"]["rates"].update({key: value}))
    with pytest.raises(BundleError, match=r"the device in manifest\.json .* wrong type or range"):
        Bundle.open(model.path)


def test_a_bundle_has_of_its_device_what_the_runtime_reads(model: MiniModel) -> None:
    """Kernel configs are for the compiler; what an older bundle has of them is not read."""
    device = json.loads((model.path / "manifest.json").read_text())["device"]
    assert {"rates", "modes", "probed"} <= device.keys() and device.keys().isdisjoint({"configs", "tile", "code", "tuned"})
    rewrite(model.path, "manifest.json", lambda manifest: manifest["device"].update(configs=[{"kind": "tall"}], tile=3))
    assert Bundle.open(model.path).descriptor.to_dict() == DeviceDescriptor.from_dict(device).to_dict()


def test_checksums_of_another_program_are_refused(model: MiniModel) -> None:
    with (files_of(model.path) / "checksums.bin").open("ab") as file:
        file.write(bytes(4))
    fit(model.path, "checksums.bin")
    with pytest.raises(BundleError, match=r"checksums\.bin is for another program"):
        Bundle.open(model.path)


def test_a_bundle_replaced_while_it_is_read_is_read_anew(model: MiniModel, monkeypatch: pytest.MonkeyPatch) -> None:
    read = flashmem.bundle.bundle.read_checked

    def replaced_first(*arguments: Any) -> bytes:
        monkeypatch.setattr(flashmem.bundle.bundle, "read_checked", read)
        write_mini_bundle(model.path, budget=5)
        return read(*arguments)

    monkeypatch.setattr(flashmem.bundle.bundle, "read_checked", replaced_first)
    assert Bundle.open(model.path).budget_bytes == 5


def _set(*keys: Any) -> Callable[[Any], None]:
    """Set the entry at the path `keys`, whose last element is the value."""

    def change(data: Any) -> None:
        for key in keys[:-2]:
            data = data[key]
        assert data[keys[-2]] != keys[-1] or type(data[keys[-2]]) is not type(keys[-1]), "changes nothing"
        data[keys[-2]] = keys[-1]

    return change


def _grow(*keys: Any) -> Callable[[Any], None]:
    """Increase the number at the path `keys` beyond the size of the file, and keep its alignment."""

    def change(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] += 1 << 40

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_grow("slices", 3, "offset"), "is outside the weight file"),
        (_grow("slices", 3, "nbytes"), "is outside the weight file"),
        (_set("slices", 3, "offset", 4097), "does not start on a page"),
        (_set("slices", 3, "offset", -4096), "wrong type or range"),
        (_set("slices", 3, "offset", 4096.0), "wrong type or range"),
        (_set("slices", 3, "offset", True), "wrong type or range"),
        (_set("slices", 3, "offset", 2**64), "wrong type or range"),
        (_set("slices", 3, "name", "w0.0"), "two slices are called 'w0.0'"),
        (_set("slices", 3, "name", "w99.0"), "reads the unknown slice"),
        (_grow("constants_offset"), "the constants are outside the weight file"),
        (_grow("constants_bytes"), "the constants are outside the weight file"),
        (_grow("tensors", 2, "offset"), "tensor 'ping' is outside the arena"),
        (_grow("tensors", 2, "nbytes"), "tensor 'ping' is outside the arena"),
        (_set("tensors", 2, "shape", [10**6]), "tensor 'ping' is smaller than its shape"),
        (_set("tensors", 2, "offset", 100), "tensor 'ping' is not aligned"),
        (_set("arena_bytes", 4096), "is outside the arena"),
        (_set("launches", 1, "args", 0, "value", "nowhere"), "reads the unknown tensor 'nowhere'"),
        (_set("launches", 1, "args", 2, "value", "nowhere"), "reads the unknown slice 'nowhere'"),
        (_grow("launches", 1, "args", 3, "value"), "reads a constant outside the constants"),
        (_grow("launches", 1, "args", 3, "nbytes"), "reads a constant outside the constants"),
        (_set("launches", 1, "args", 3, "value", -512), "reads a constant that is not aligned"),
        (_set("launches", 1, "args", 4, "value", 2**31), "wrong type or range"),
        (_set("launches", 1, "args", 4, "kind", "pointer"), "wrong type or range"),
        (_set("launches", 1, "kernel", "a b"), "names no kernel"),
        (_set("launches", 1, "global_size", [0]), "bad global or local size"),
        (_set("launches", 1, "global_size", [1, 1, 1, 1]), "bad global or local size"),
        (_set("launches", 1, "local_size", [3]), "bad global or local size"),
        (_set("launches", []), "no layer reads the slice"),
        (_set("inputs", 1, "tensor", "nowhere"), "names the unknown tensor 'nowhere'"),
        (_set("inputs", 1, "shape", [100000]), "larger than its tensor"),
        (_set("inputs", 1, "dtype", "object"), "unknown dtype 'object'"),
        (_set("inputs", 1, "dtype", "int64"), "differ in type"),
        (_set("outputs", 0, "tensor", None), "output .y. has no tensor"),
        (_grow("host_embeddings", 0, "offset"), "is outside the weight file"),
        (_grow("host_embeddings", 0, "rows"), "is outside the weight file"),
        (_grow("host_embeddings", 0, "row_stride"), "is outside the weight file"),
        (_set("host_embeddings", 0, "columns", 10**9), "is outside the weight file"),
        (_set("host_embeddings", 0, "columns", 0), "is empty"),
        (_set("host_embeddings", 0, "panel", 0), "is empty"),
        (_set("host_embeddings", 0, "indices", "x"), "is not indexed by integers"),
        (_set("host_embeddings", 0, "tensor", "x"), "does not fit its tensor"),
        (_set("host_embeddings", 0, "block_bytes", 1), "has no whole blocks"),
        (_set("weights_bytes", 4096), "is outside the weight file"),
        (lambda data: data.pop("arena_bytes"), "is damaged"),
        (lambda data: data.update(surprise=1), "is damaged"),
        (_set("launches", None), "is damaged"),
    ],
)
def test_a_tampered_program_is_refused(change: Callable[[Any], None], message: str, model: MiniModel) -> None:
    rewrite(model.path, "program.json", change)
    with pytest.raises(BundleError, match=message):
        Bundle.open(model.path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_grow("weights", 3, "nbytes"), "differs from the problem's in size or use"),
        (_set("weights", 3, "first_use", 1), "differs from the problem's in size or use"),
        (_set("weights", 3, "name", "nowhere"), "does not hold each weight"),
        (lambda data: data["weights"].pop(), "does not hold each weight"),
        (_set("weights", 3, "read_layer", 20), "its plan does not hold"),
        (_set("weights", 3, "moves", [[1, 10**6]]), "its plan does not hold"),
        (_set("weights", 3, "moves", [[25, 1]]), "its plan does not hold"),
        (_set("weights", 3, "moves", [[1, -3]]), "wrong type or range"),
        (_set("chunk_bytes", 0), "no chunk size"),
        (lambda data: data["capacities"].pop(), "another number of layers"),
        (_set("layouts", "alias", "offsets", "w1.0", 1 << 40), "its plan does not hold|outside its pool"),
        (_set("layouts", "alias", "pool_bytes", 4096), "its plan does not hold|outside its pool"),
        (lambda data: data["layouts"]["dma"]["offsets"].pop("w1.0"), "its plan does not hold|no place"),
        (_set("layouts", "interleave", "staging", "w1.0", 1 << 40), "its plan does not hold|outside its pool"),
        (_set("layouts", "interleave", "staging_bytes", 64), "its plan does not hold|outside its pool"),
        (_set("layouts", "interleave", "staging_slots", [64]), "its plan does not hold"),
        (_set("layouts", "alias", "staging_slot_of", {"w1.0": 1}), "has no staging slot"),
        (_set("layouts", "dma", "ring_bytes", 64), "its plan does not hold"),
        (lambda data: data["layouts"].update(teleport=data["layouts"]["dma"]), "unknown transfer mode 'teleport'"),
        (_set("tier", "luck"), "wrong type or range"),
    ],
)
def test_a_tampered_plan_is_refused(change: Callable[[Any], None], message: str, model: MiniModel) -> None:
    rewrite(model.path, "plan.json", change)
    with pytest.raises(BundleError, match=message):
        Bundle.open(model.path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("program.json", _grow("slices", 3, "height"), "is outside the weight file"),
        ("program.json", _set("slices", 3, "width", 100), "rows that overlap"),
        ("program.json", _set("slices", 3, "row_pitch", 1020), "rows that overlap"),
        ("plan.json", _set("layouts", "dma", "slot_of", "w1.0", 1000), "texture slot"),
        ("plan.json", _set("layouts", "dma", "slots", 0, "width", 1), "slot"),
        ("plan.json", _set("layouts", "dma", "slots", 0, "channel", "half"), "slot"),
    ],
)
def test_tampered_textures_are_refused(
    name: str, change: Callable[[Any], None], message: str, textured: MiniModel, tmp_path: Path
) -> None:
    shutil.copytree(textured.path, tmp_path / "t.flashmem")
    Bundle.open(tmp_path / "t.flashmem")
    rewrite(tmp_path / "t.flashmem", name, change)
    with pytest.raises(BundleError, match=message):
        Bundle.open(tmp_path / "t.flashmem")


def _leaves(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(data, dict):
        return [leaf for key, value in data.items() for leaf in _leaves(value, (*path, key))]
    if isinstance(data, list):
        return [leaf for index, value in enumerate(data) for leaf in _leaves(value, (*path, index))]
    return [path]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(
    name=st.sampled_from(["program.json", "plan.json"]),
    value=st.one_of(
        st.integers(), st.sampled_from([0, 512, 4096, 2**40, -1, 2**63]), st.text(max_size=3), st.none(), st.floats()
    ),
    data=st.data(),
)
def test_whatever_is_put_anywhere_is_refused_or_harmless(
    name: str, value: Any, data: st.DataObject, model: MiniModel, written: MiniModel
) -> None:
    original = json.loads((files_of(written.path) / name).read_text())
    path = data.draw(st.sampled_from(_leaves(original)))
    changed = copy.deepcopy(original)
    _put(changed, path, value)
    for file in ("program.json", "plan.json"):
        shutil.copy(files_of(written.path) / file, files_of(model.path) / file)
    shutil.copy(written.path / "manifest.json", model.path / "manifest.json")
    rewrite(model.path, name, lambda content: (content.clear(), content.update(changed)))
    try:
        bundle = Bundle.open(model.path)
    except BundleError:
        return
    program, size = bundle.program, (bundle.weights_path).stat().st_size
    for part in program.slices:
        assert 0 <= part.offset <= part.offset + part.nbytes <= size
    for tensor in program.tensors:
        assert 0 <= tensor.offset <= tensor.offset + 4 * math.prod(tensor.shape) <= program.arena_bytes
    for gather in program.host_embeddings:
        last = gather.rows - 1
        end = gather.offset + last // gather.panel * gather.row_stride + (gather.columns - 1) * gather.column_stride
        assert 0 <= gather.offset <= end + np.dtype(gather.dtype).itemsize <= size
    for mode, layout in bundle.plan.layouts.items():
        for part in program.slices if mode != "map" else ():
            assert layout.offsets[part.name] + part.nbytes <= layout.pool_bytes


def _put(data: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


def test_numbers_that_no_float_holds_are_refused(model: MiniModel) -> None:
    """Python's JSON has whole numbers of any size, and floats that are too large for a kernel's."""
    blend = ("launches", 0, "args", 4, "value")
    for name, *place in (
        ("manifest.json", "device", "rates", "disk_bandwidth", 10**400),
        ("manifest.json", "device", "rates", "disk_bandwidth", 2**62),
        ("plan.json", "solve_seconds", 10**400),
        ("plan.json", "objective", -(10**400)),
        ("program.json", *blend, 10**400),
        ("program.json", *blend, -(10**39)),
        ("program.json", *blend, 3.5e38),
        ("program.json", *blend, "1"),
    ):
        kept = {path: path.read_bytes() for path in (model.path / "manifest.json", *files_of(model.path).glob("*.json"))}
        rewrite(model.path, name, _set(*place))
        with pytest.raises(
            BundleError, match="of the bundle holds a value of the wrong type or range; compile the model again"
        ):
            Bundle.open(model.path)
        for path, content in kept.items():
            path.write_bytes(content)
    for value in (3.4e38, -3.4e38, 0, 10**38, float("inf"), float("-inf"), float("nan")):
        rewrite(model.path, "program.json", _set(*blend, value))
        assert repr(Bundle.open(model.path).program.launches[0].args[4].value) == repr(value)


def test_pieces_of_no_bytes_are_refused(model: MiniModel) -> None:
    """A loader would copy nothing, for ever."""

    def shrink(plan: Json) -> None:
        plan["layouts"]["dma"].update(piece_bytes=1, ring_bytes=plan["layouts"]["dma"]["threads"] * 16)

    own = files_of(model.path) / "plan.json"
    kept = own.read_bytes()
    for change, message in (
        (shrink, "no row or page of slice 'w0.0' in mode dma fits the ring"),
        (_set("layouts", "dma", "piece_bytes", 0), "its layout for mode dma has pieces of no bytes"),
        (_set("piece_bytes", 0), "its plan has pieces of no bytes"),
        (_set("loader_threads", 0), "its plan is for 0 loader threads"),
    ):
        own.write_bytes(kept)
        rewrite(model.path, "plan.json", change)
        with pytest.raises(BundleError, match=f"the bundle is damaged: {message}; compile the model again"):
            Bundle.open(model.path)


def test_a_bundle_that_was_replaced_gives_no_tokenizer_of_another_model(model: MiniModel) -> None:
    bundle = model.open()
    assert bundle.language() is None
    write_mini_bundle(model.path)
    with pytest.raises(BundleError, match="was replaced since it was opened; open it again"):
        bundle.language()
    assert Bundle.open(model.path).language() is None
