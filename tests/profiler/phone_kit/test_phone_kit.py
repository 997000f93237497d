"""The phone kit: made here, run by its own file, read by `flashmem profile --dataset`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants

import flashmem
from flashmem.base.errors import UserError
from flashmem.base.resources import names
from flashmem.compiler.ir.blocks import FORMATS
from flashmem.profiler import rates as machine_rates
from flashmem.profiler.dataset import read_dataset, write_dataset
from flashmem.profiler.phone_kit import models, packing, storage
from flashmem.profiler.phone_kit import steps as kit_steps
from flashmem.profiler.phone_kit.children import Ended
from flashmem.profiler.phone_kit.contents import STREAMED, Contents
from flashmem.profiler.phone_kit.measuring import run_steps, write_record
from flashmem.profiler.phone_kit.start import unpack
from flashmem.profiler.phone_kit.steps import STEPS, Chosen, KitRun
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.opencl.probes import Probe
from flashmem.target.descriptor import IMPORT_HOST_MEMORY, load_descriptor
from flashmem.tools.verify import TOLERANCE, compare, reference
from tests.support.made_profile import BASIS, law

CPUS = [device for device in list_devices() if device.kind == "cpu" and device.descriptor_name in ("pocl", "intel-cpu")]
if not CPUS:
    pytest.skip("a kit is for a device with a descriptor of its own", allow_module_level=True)
DEVICE = CPUS[0]
NUMBER = list_devices().index(DEVICE)
PATHS = load_descriptor(DEVICE.descriptor_name).memory_paths


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kit with two small models for the device here."""
    path = tmp_path_factory.mktemp("kit") / "k.pyz"
    small = replace(models.streamed(2, 64), name="small")
    with pytest.MonkeyPatch.context() as patch:
        for name, shapes in (("CPU_GEMMS", ((32, 64, 64), (48, 64, 64))), ("DELAYED_GEMM", (32, 64, 64))):
            patch.setattr(f"flashmem.profiler.packing.{name}", shapes)
        patch.setattr("flashmem.profiler.packing.TRAFFIC_ELEMENTS", 1 << 16)
        return packing.write_phone_kit(
            path, [DEVICE.descriptor_name], lambda what, done: None, models=[small, models.streamed(3, 128)], kernels=4
        )


@pytest.fixture(scope="module")
def unpacked(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    unpack(archive, folder)
    return folder


@pytest.fixture
def kit(unpacked: Path, tmp_path: Path) -> KitRun:
    device = Chosen(NUMBER, DEVICE.name, DEVICE.descriptor_name, load_descriptor(DEVICE.descriptor_name).modes)
    return KitRun(Contents.open(unpacked), tmp_path, monotonic() + 300, device=device, wanted=DEVICE.descriptor_name)


def test_the_models_need_every_kernel_family(tmp_path: Path) -> None:
    model = models.families()
    made = flashmem.compile(model.save(tmp_path), tmp_path / "f.flashmem", device="adreno750", build=False)
    folders = ("attention", "contraction", "convolution", "elementwise", "indexing", "movement", "recurrent", "reduction",
               "sampling", "selection", "spatial")  # fmt: skip
    templates = {name.removesuffix(".cl") for each in folders for name in _templates(each)}
    parts = {"mac", "codes", "staged", "tensor", "group", "shared", "common", "sort_order", "heap", "blocks"}  # of others
    parts |= {"winograd", "best_of_chunks", "candidates_by_heap"}  # of CPUs
    parts |= {"split_keys", "join_chunks", "tensor_attention", "mask_blocks", "join_sums", "tensor_codes"}  # of NVIDIA
    # Of states, and of a vocabulary: the kit's models have neither. Rows of blocks are another model's.
    parts |= {"scatter_quantised", "rotary_scatter", "candidates_by_rank", "join_candidates", "block_rows"}
    assert {launch.kernel.rpartition("_")[0] for launch in made.program.launches} == templates - parts


def _templates(folder: str) -> list[str]:
    from flashmem.base import resources

    files = resources.resources.files("flashmem.kernels") / "templates" / folder
    return [file.name.removesuffix(".j2") for file in files.iterdir()]


@pytest.mark.parametrize("model", [models.families(), models.half(), models.blocks()], ids=lambda model: model.name)
def test_the_models_give_the_right_answers_here(model: models.KitModel, tmp_path: Path) -> None:
    path = model.save(tmp_path)
    bundle = flashmem.compile(path, tmp_path / "m.flashmem", device=DEVICE.descriptor_name, precision=model.precision)
    outputs = [port.name for port in bundle.program.outputs]
    with flashmem.Session(bundle, device=DEVICE.descriptor_name) as session:
        answers = session.run(None, model.inputs)
    assert (
        compare(answers, reference(model.save_plain(tmp_path), model.inputs, outputs), model.precision).relative_error
        < TOLERANCE[model.precision]
    )


def test_the_models_have_products_and_tables_in_blocks(tmp_path: Path) -> None:
    """Of bits that are the package gguf's."""
    model = models.blocks()
    for number, kind in enumerate(models.BLOCKS):
        made = FORMATS[kind].floats(models.block_bytes(kind, 3, 512, number))
        np.testing.assert_array_equal(made, quants.dequantize(models.block_bytes(kind, 3, 512, number), Kind[kind]))
    made = flashmem.compile(model.save(tmp_path), tmp_path / "b.flashmem", device="adreno750", build=False)
    kernels = [launch.kernel.rpartition("_")[0] for launch in made.program.launches]
    assert len(made.program.host_embeddings) + kernels.count("block_rows") == len(models.BLOCKS)
    assert sum(each.startswith("matmul") for each in kernels) == 2 * len(models.BLOCKS)


@pytest.mark.thorough
def test_a_kit_runs_from_its_file_and_is_read(archive: Path, tmp_path: Path) -> None:
    """All steps but the rates and the heat, which the next tests run: they take a minute."""
    program = (
        "import sys; from flashmem.profiler.phone_kit import measuring, steps\n"
        "for name in ('rates', 'heat'): steps.STEPS.pop(name)\n"
        "measuring.main()"
    )
    folder, record = tmp_path / "kit", tmp_path / "phone.json"
    library = unpack(archive, folder)
    environment = {**os.environ, "PYTHONPATH": str(library)}
    words = (str(folder), "--device", str(NUMBER), "--minutes", "9", "-o", str(record))
    command = [sys.executable, "-P", "-c", program, *words]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(record) and not (folder / "work").exists()
    found = json.loads(record.read_text())
    device = {"number": NUMBER, "name": DEVICE.name, "descriptor": DEVICE.descriptor_name}
    assert found["device"].items() >= device.items() and set(found["device"]["modes"]) == set(PATHS)
    ran = found["steps"]["correctness"]["result"]
    assert {row["model"] for row in ran} == {"small", STREAMED} and len(ran) == 2 * 4 * len(PATHS)
    right = {(row["memory_path"], row["mode"]) for row in ran if row["outcome"] == "right"}
    assert right == {(path, mode) for path in PATHS for mode in load_descriptor(DEVICE.descriptor_name).modes[path]}
    assert all(row["largest_error"] <= 1e-3 for row in ran if row["outcome"] == "right")
    assert {row["outcome"] for row in ran} <= {"right", "refused"}
    preloaded = [row for row in found["steps"]["streamed"]["result"] if row["mode"] == "preload"]
    assert [row["report"]["strategy"] for row in preloaded] == ["preload"] * len(PATHS)
    assert {"direct", "threads", "bytes_per_second"} <= found["steps"]["storage"]["result"][1].keys()
    assert found["steps"]["probes"]["result"]["CL_MEM_USE_HOST_PTR"]["outcome"] == "passed"


@pytest.mark.thorough
def test_the_file_starts_the_steps(archive: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(archive), "--folder", str(tmp_path / "kit"), "--device", "nothing-like-it"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no device 'nothing-like-it' is here" in done.stderr, done.stderr
    record = json.loads((tmp_path / "flashmem-phone.json").read_text())
    assert [each["said"] for each in record["steps"].values()][1:] == ["there is no device"] * (len(STEPS) - 1)
    assert record["steps"]["doctor"]["result"]["devices"], "what the doctor found is kept"
    short = subprocess.run([*command, "--minutes", "0.1"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert short.returncode == 2 and "--minutes 0.1 is too short" in short.stderr


def test_a_damaged_file_is_refused(archive: Path, tmp_path: Path) -> None:
    content = archive.read_bytes()
    (tmp_path / "bad.pyz").write_bytes(content[: len(content) // 2] + bytes(64) + content[len(content) // 2 + 64 :])
    command = [sys.executable, str(tmp_path / "bad.pyz"), "--folder", str(tmp_path / "kit")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "copy it again" in done.stderr, done.stderr
    assert not (tmp_path / "kit/kit.json").exists()


@pytest.mark.thorough
def test_a_wrong_answer_is_told_with_its_output(kit: KitRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one mode that all paths have; the whole kit above runs all of them."""
    answers, offered = Contents.answers, load_descriptor(DEVICE.descriptor_name).modes
    [mode, *_] = sorted(set.intersection(*(set(offered[path]) for path in PATHS)))
    monkeypatch.setattr(kit_steps, "MODES", (mode,))

    def other(contents: Contents, model: str) -> dict[str, Any]:
        return {name: value + (np.ptp(value) if model == "small" else 0) for name, value in answers(contents, model).items()}

    monkeypatch.setattr(Contents, "answers", other)
    record = run_steps(kit, {"correctness": STEPS["correctness"]})["steps"]["correctness"]
    assert not record["ok"] and "small, " in record["said"] and "Identity" in record["said"]
    assert [row["outcome"] for row in record["result"] if row["model"] == STREAMED] == ["right"] * len(PATHS)


def test_a_refusal_of_a_mode_that_the_device_has_is_a_failure(kit: KitRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 2 alone does not tell whether the device lacks the mode."""
    refused = Ended("", 2, "flashmem: Bad address", 0.1)
    monkeypatch.setattr(KitRun, "child", lambda *given: refused)
    record = run_steps(kit, {"streamed": STEPS["streamed"]})["steps"]["streamed"]
    offered = {(path, mode) for path in PATHS for mode in load_descriptor(DEVICE.descriptor_name).modes[path]}
    failed = {(row["memory_path"], row["mode"]) for row in record["result"] if row["outcome"] == "failed"}
    assert not record["ok"] and failed == offered | {(path, "preload") for path in PATHS}


def _of_module(body: str, seconds: float = 20) -> Any:
    """A step that runs Python code in a child process."""

    def step(kit: KitRun) -> Any:
        (kit.work / "made_up_step.py").write_text(body)
        environment = {**os.environ, "PYTHONPATH": str(kit.work)}
        ended = kit_steps.run_child([sys.executable, "-m", "made_up_step"], seconds, environment)
        return kit_steps._rows(ended)

    return step


def test_crashes_and_hangs_are_recorded_and_the_others_go_on(kit: KitRun) -> None:
    crash = "import os; print('{\"a\": 1}', flush=True); os.abort()"
    hang = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    )
    made = {"crash": _of_module(crash), "hang": _of_module(hang, 1.0), "raises": lambda kit: {}["no"]}
    begun = monotonic()
    record = run_steps(kit, {**made, "good": _of_module("print('{\"b\": 2}')")})["steps"]
    assert monotonic() - begun < 15
    assert (record["crash"]["ok"], record["crash"]["result"]) == (False, [{"a": 1}]) and "signal 6" in record["crash"]["said"]
    assert "did not end within 1 s" in record["hang"]["said"] and "KeyError" in record["raises"]["said"]
    assert record["good"] == {"ok": True, "said": "", "seconds": record["good"]["seconds"], "result": [{"b": 2}]}


def test_no_step_begins_after_the_time(kit: KitRun) -> None:
    kit.deadline = monotonic()
    assert run_steps(kit, STEPS)["steps"]["storage"]["said"] == "no time was left"


def test_an_interrupted_kit_continues_with_the_next_step(kit: KitRun) -> None:
    calls: list[str] = []

    def stops(kit: KitRun) -> None:
        calls.append("stops")
        raise KeyboardInterrupt

    made = {name: lambda kit, name=name: calls.append(name) for name in ("first", "last")}
    ordered = {"first": made["first"], "stops": stops, "last": made["last"]}
    with pytest.raises(KeyboardInterrupt):
        run_steps(kit, ordered)
    record = run_steps(kit, ordered)["steps"]
    assert calls == ["first", "stops", "last"]
    assert record["stops"]["said"] == "the kit was interrupted in this step" and record["last"]["ok"]
    run_steps(kit, {"first": made["first"]}, fresh=True)
    assert calls[-1] == "first"


def test_a_record_is_whole_or_missing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_record(tmp_path / "phone.json", {"x": object()})
    assert list(tmp_path.iterdir()) == []


def test_the_file_says_what_is_used_instead_of_wrong_kernels(kit: KitRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three kernels of each bundle, as `flashmem verify` prints them: right, not comparable, and wrong."""
    rows = [
        {"kernel": name, "known": False, "compared": compared, "twin": 0, "wrong": wrong, "instead": instead}
        for name, compared, wrong, instead in (
            ("a", 8, "", ""), ("b", 0, "", ""), ("c", 8, "c: 3 elements", "it is used without optimisation"),
        )
    ]  # fmt: skip
    printed = Ended(json.dumps({"kernels": rows}), 0, "", 0.1)
    monkeypatch.setattr(KitRun, "child", lambda *asked: printed)
    found = run_steps(kit, {"kernels": STEPS["kernels"]})["steps"]["kernels"]
    assert not found["ok"] and "c: 3 elements" in found["said"]
    assert {row["checked"] for row in found["result"]} == {2}
    assert all(row["instead"] == {"c": "it is used without optimisation"} for row in found["result"])


def test_kernels_under_load(kit: KitRun, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashmem.profiler import bench
    from flashmem.profiler.kit import Kit as Launches
    from flashmem.profiler.phone_kit import heat
    from flashmem.runtime.opencl.devices import descriptor_for

    monkeypatch.setattr(heat, "CPU_GEMMS", ((32, 64, 64), (48, 64, 64)))
    monkeypatch.setattr(heat, "TRAFFIC_ELEMENTS", 1 << 16)
    monkeypatch.setattr(bench, "_POOL_BYTES", 16 << 20)
    supply = Launches(kit.contents.launches(DEVICE.descriptor_name)).supply(PATHS[0])
    with bench.Bench(DEVICE, descriptor_for(DEVICE).on_path(PATHS[0]), kit.work, supply) as made:
        rows = list(heat.heat(made, 2.0, 0.5))
    assert len(rows) >= 2 and rows[-1]["second"] < 2.5
    assert all(row["gemm_flops"] > 1e6 and row["memory_bandwidth"] > 1e6 for row in rows)


def test_rates_of_storage(tmp_path: Path) -> None:
    rows = list(storage.rates(tmp_path, 4 << 20, (1, 3)))
    assert [(row["what"], row.get("direct"), row.get("threads")) for row in rows] == [
        ("write", None, None), ("read", False, 1), ("read", False, 3), ("read", True, 1), ("read", True, 3),
        ("read from the page cache", None, 1),
    ]  # fmt: skip
    assert all(row["bytes_per_second"] or row["said"] for row in rows) and list(tmp_path.iterdir()) == []


def _record_with(path: Path, rates: Any, said: str = "") -> Path:
    write_record(path, {"steps": {"rates": {"ok": not said, "said": said, "result": rates}}})
    return path


def _dataset_text(folder: Path, count: int) -> str:
    import gzip

    rate = machine_rates.MachineRates(load_descriptor("pocl").rates, {}).to_dict()
    descriptor = load_descriptor("adreno750")
    about = {"source": "a phone", "rates": rate, "basis": vars(BASIS), "seed": 0, "descriptor": descriptor.portable.to_dict()}
    write_dataset(folder / "x.profile.csv.gz", about, law(count))
    return gzip.decompress((folder / "x.profile.csv.gz").read_bytes()).decode()


@pytest.mark.parametrize("count", [3, 40])
def test_a_record_becomes_a_descriptor(count: int, tmp_path: Path) -> None:
    from flashmem.profiler.run import retrain

    record = _record_with(tmp_path / "my-phone.json", _dataset_text(tmp_path, count))
    _, rows = read_dataset(record)
    assert sum(row.mode == "none" for row in rows) == count
    path = retrain(record)
    assert path == tmp_path / "my-phone.toml"
    descriptor = load_descriptor(str(path))
    trained = str(tmp_path / "my-phone") if count == 40 else ""
    assert (descriptor.name, descriptor.capacity_model) == ("my-phone", trained)
    assert (tmp_path / "my-phone.seconds.ubj").exists() == bool(trained)


def test_a_passed_probe_turns_its_way_on(tmp_path: Path) -> None:
    from flashmem.profiler.run import retrain

    found = [
        Probe(IMPORT_HOST_MEMORY, "passed", "", driver="a phone, 1.0"),
        Probe("CL_MEM_USE_HOST_PTR", "passed", "", driver="a phone, 1.0"),
        Probe("cl_qcom_recordable_queues", "failed", "", driver="a phone, 1.0"),
    ]
    rates = {"ok": True, "said": "", "result": _dataset_text(tmp_path, 3)}
    probes = {"ok": True, "said": "", "result": {each.extension: asdict(each) for each in found}}
    write_record(tmp_path / "my.json", {"steps": {"rates": rates, "probes": probes}})
    descriptor = load_descriptor(str(retrain(tmp_path / "my.json")))
    assert descriptor.probed == {IMPORT_HOST_MEMORY: "a phone, 1.0"}
    assert descriptor.modes["buffer"] == (*load_descriptor("adreno750").modes["buffer"], "map")
    assert descriptor.rates.contention["map"] == descriptor.rates.contention["alias"]


def test_other_files_are_no_records(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no rates of the phone \(signal 11 ended the process\)"):
        read_dataset(_record_with(tmp_path / "a.json", None, "signal 11 ended the process"))
    for content in ("{}", "[]", "3", "{"):
        (tmp_path / "b.json").write_text(content)
        with pytest.raises(UserError, match="is not a profile dataset"):
            read_dataset(tmp_path / "b.json")


def test_what_is_no_kit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="has no phone kit"):
        Contents.open(tmp_path)
    (tmp_path / "kit.json").write_text('{"version": 99}')
    with pytest.raises(UserError, match="version 99"):
        Contents.open(tmp_path)
    monkeypatch.setattr(packing, "_PACKAGING", tmp_path)
    with pytest.raises(UserError, match="in a checkout"):
        packing.write_phone_kit(tmp_path / "k.pyz", ["pocl"], lambda what, done: None)


def test_each_phone_has_its_bundles() -> None:
    contents = Contents(Path(), {"devices": {"adreno750": {}, "generic-gpu": {}}})
    assert [contents.device_for(name) for name in ("adreno750", "mali-g52", "pocl")] == ["adreno750"] + ["generic-gpu"] * 2
    assert Contents(Path(), {"devices": {"adreno750": {}}}).device_for("pocl") == ""
    assert set(packing.PHONES) <= set(names("devices", ".toml"))
