"""`flashmem tune`: its tuning database, resumption, and the kernel configs selected from it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.base.errors import UserError
from flashmem.compilation import Compilation
from flashmem.compiler.configs.config import KernelConfig
from flashmem.compiler.configs.listed import configs_of, listed_configs, with_configs
from flashmem.compiler.configs.workload import TF32, Workload
from flashmem.compiler.kernels.contraction.configs import PlainContraction, StagedContraction
from flashmem.compiler.kernels.contraction.tensor_cores import TensorContraction
from flashmem.compiler.options import Options
from flashmem.compiler.selection.configs import choose, seconds
from flashmem.compiler.selection.selector import KernelSelector, fewest, packed_bytes
from flashmem.compiler.selection.tuning_database import (
    COLUMNS,
    NEAR,
    SUFFIX,
    Timing,
    TuningDatabase,
    content_hash,
    parse_database,
)
from flashmem.planning.capacity.features import KERNEL_FEATURES, kernel_features, launch_features
from flashmem.planning.capacity.predictor import Predictor
from flashmem.profiler.dataset import SUFFIX as DATASET
from flashmem.profiler.dataset import read_dataset, write_dataset
from flashmem.profiler.descriptor import name_table, write_descriptor
from flashmem.profiler.shapes import Attention, Batched, Convolution, Matmul, Shape, unet_shapes, zoo_shapes
from flashmem.profiler.timing import generated
from flashmem.profiler.tuning import Case, TuningRequest, TuningResult, cases, summary, tune
from flashmem.runtime.kernels import pool
from flashmem.target.descriptor import DeviceDescriptor, PlainTile, load_descriptor
from tests.support.command_line import invoke
from tests.support.miscompiling_worker import KERNEL
from tests.support.paths import DATA, ROOT

CONFIGS = (
    PlainContraction("wide", 4, 16, 8, families=("matmul", "conv")),
    StagedContraction("shared", 2, 4, (2, 2), k_block=8, slice_k=2, families=("matmul",)),
    PlainContraction("crowd", 2, 4, 4, (4096, 4096), families=("matmul",)),
    StagedContraction("greedy", 2, 4, (8, 8), k_block=1 << 22, families=("matmul",)),
)
POCL = replace(
    with_configs(load_descriptor("pocl"), CONFIGS),
    capacity_model="",
    tuned="",
    tile=PlainTile(rows=2, columns=8, vector=8),
)
ABOUT = {"device": "none", "version": 2}
CASES = (Case(Matmul(9, 12, 20), "buffer"), Case(Convolution(4, 5, 5, 8, (3, 3)), "buffer"))


def tuned(folder: Path, timings: list[Timing], descriptor: DeviceDescriptor = POCL) -> DeviceDescriptor:
    """The descriptor with a tuning database of these timings."""
    (folder / f"mine{SUFFIX}").write_text(TuningDatabase(ABOUT, timings).text())
    return replace(descriptor, tuned=str(folder / "mine"))


def timing(workload: Workload, config: KernelConfig, took: float | None) -> Timing:
    return Timing(workload, config.name, config.code, took, "" if took else 'it failed, in two words, "really"')


sizes = st.integers(1, 5000)
workloads = st.builds(
    Workload, st.sampled_from(["matmul", "conv", "matmul_dynamic"]), st.sampled_from(["buffer", "texture"]), sizes, sizes,
    sizes, st.integers(1, 20), st.sampled_from(["float32", "float16"]),
)  # fmt: skip
times = st.one_of(st.none(), st.floats(1e-7, 10))
timings = st.lists(st.builds(timing, workloads, st.sampled_from(CONFIGS), times), max_size=12)


@settings(max_examples=60, deadline=None)
@given(timings, workloads)
def test_the_choice_is_of_the_list_and_never_one_that_failed(
    tmp_path_factory: pytest.TempPathFactory, measured: list[Timing], workload: Workload
) -> None:
    descriptor = tuned(tmp_path_factory.mktemp("table"), measured)
    chosen = choose(descriptor, workload)
    assert chosen in configs_of(descriptor, workload.family)
    here = {t.config: t for t in measured if t.workload == workload}  # the last line of two counts
    if any(t.seconds for t in here.values()) and workload.family != "matmul_dynamic":
        known = [v for v in configs_of(descriptor, workload.family) if v.name in here]
        ran = {v: here[v.name].seconds for v in known if here[v.name].seconds}
        assert not ran or ran.get(chosen) == min(filter(None, ran.values()))
    for use in (KernelSelector(descriptor, "cold"), KernelSelector(descriptor)):
        assert use.config(workload) in configs_of(descriptor, workload.family)


@settings(max_examples=60, deadline=None)
@given(timings)
def test_a_table_reads_as_it_was_written(measured: list[Timing]) -> None:
    read = parse_database(TuningDatabase(ABOUT, measured).text(), "a table")
    assert read.about == ABOUT
    assert [t.workload for t in read.timings] == [t.workload for t in measured]
    for got, want in zip(read.timings, measured, strict=True):
        assert (got.config, got.code, got.note) == (want.config, want.code, want.note)
        assert got.seconds == (want.seconds and pytest.approx(want.seconds, rel=1e-3))


def test_the_nearest_product_counts_scaled_by_its_work(tmp_path: Path) -> None:
    tile, wide, *_ = configs_of(POCL, "matmul")
    small, large = Workload("matmul", "buffer", 8, 64, 64), Workload("matmul", "buffer", 512, 64, 64)
    lines = [timing(small, tile, 1e-3), timing(small, wide, 2e-3), timing(large, tile, 9e-3), timing(large, wide, 4e-3)]
    descriptor = tuned(tmp_path, lines)
    near_large = replace(large, rows=300)
    assert choose(descriptor, replace(small, rows=9)) == tile and choose(descriptor, near_large) == wide
    assert seconds(descriptor, near_large)[wide] == pytest.approx(4e-3 * 300 / 512)
    far = replace(large, rows=512 * 2 ** (NEAR + 1), columns=1 << 20)
    assert len(seconds(descriptor, far)) == len(configs_of(POCL, "matmul"))  # no similar workload: all are estimated
    assert len(seconds(descriptor, replace(large, path="texture"))) == len(configs_of(POCL, "matmul"))
    changed = replace(with_configs(POCL, [replace(wide, rows=8)]), tuned=descriptor.tuned)
    assert list(seconds(changed, large)) == [tile]  # the config measured under this name was another one


def test_tensor_cores_are_estimated_where_only_floats_were_measured(tmp_path: Path) -> None:
    tensor = TensorContraction("tensor", 2, 16, (32, 4), k_block=64, pipeline=3)
    [tile, *_] = configs_of(POCL, "matmul")
    halves = Workload("matmul", "buffer", 512, 64, 64, storage="float16")
    floats = replace(halves, storage="float32")
    listing = with_configs(POCL, [tensor])
    known = seconds(tuned(tmp_path, [timing(floats, tile, 3.0)], listing), halves)
    assert known[tile] == 3.0 and 0 < known[tensor] < 1e-3
    measured = [timing(floats, tile, 3.0), timing(halves, tile, 2.0), timing(halves, tensor, None)]
    assert seconds(tuned(tmp_path, measured, listing), halves) == {tile: 2.0}, "it failed"


def test_the_key_of_a_bundle_changes_with_the_table(tmp_path: Path) -> None:
    model = DATA / "vit-tiny.onnx"
    tile, wide, *_ = configs_of(POCL, "matmul")
    workload = Workload("matmul", "buffer", 8, 64, 64)
    keys = set()
    for took in (1e-3, 2e-3):
        descriptor = tuned(tmp_path, [timing(workload, tile, took), timing(workload, wide, 1234.0)])
        assert content_hash(descriptor) and "1234" not in str(descriptor.to_dict())
        keys.add(Compilation(model, (Options(descriptor, "map"),)).name)
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "list index out of range"),
        ("family,path\n", "Expecting value"),
        ('# {"version": 7}\n', "it is of version 7, not 2"),
        ('# {"version": 2}\nfamily,path\n', "its columns are not family, path"),
        (f'# {{"version": 2}}\n{",".join(COLUMNS)}\nmatmul,buffer\n', "more or fewer cells"),
        (f'# {{"version": 2}}\n{",".join(COLUMNS)}\nmatmul,disk,float32,1,1,1,1,1,1,tile,x,1.0,\n', "no memory path"),
        (f'# {{"version": 2}}\n{",".join(COLUMNS)}\nmatmul,buffer,float32,1,0,1,1,1,1,tile,x,1.0,\n', "nothing to multiply"),
        (f'# {{"version": 2}}\n{",".join(COLUMNS)}\nmatmul,buffer,float32,1,1,1,1,1,1,tile,x,nan,\n', "nan seconds"),
    ],
)
def test_a_bad_table_is_refused_in_one_sentence(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / f"bad{SUFFIX}").write_text(text)
    with pytest.raises(UserError, match=rf"bad\.tuned\.csv is not a tuning database \(.*{reason}.*run flashmem tune") as e:
        choose(replace(POCL, tuned=str(tmp_path / "bad")), Workload("matmul", "buffer", 8, 8, 8))
    assert "\n" not in str(e.value)


def test_a_missing_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.tuned\.csv cannot be read \(No such file"):
        choose(replace(POCL, tuned=str(tmp_path / "none")), Workload("matmul", "buffer", 8, 8, 8))


def test_a_descriptor_keeps_configs_parallelism_and_table(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    wanted = replace(tuned(tmp_path / "a", []), name="mine", parallelism=77, measured=True)
    (tmp_path / "b").mkdir()
    read = load_descriptor(str(write_descriptor(tmp_path / "b", wanted, "a test", "cpu")))
    assert (listed_configs(read), read.parallelism) == (CONFIGS, 77)
    assert read.tuned == str(tmp_path / "b" / "mine") and content_hash(read) == content_hash(wanted)


def test_naming_a_table_keeps_what_a_descriptor_says(tmp_path: Path) -> None:
    text = '# by hand\nname = "mine"\nparallelism = 5 # few\n\n[[configs]]\nkind = "plain"\nname = "a"\n'
    text += "rows = 1\ncolumns = 4\nvector = 4\n[rates.contention]\nmap = 0\nalias = 0\ndma = 0\ninterleave = 0\n"
    (tmp_path / "mine.toml").write_text(text)
    for name in ("one", "two"):
        path = name_table(tmp_path, replace(POCL, name="mine"), name)
        assert path.read_text() == text.replace('"mine"\n', f'"mine"\ntuned = "{name}"\n')
    assert load_descriptor(str(path)).tuned == str(tmp_path / "two")


# -- measuring


def run(folder: Path, every: tuple[Case, ...] = CASES, **request: object) -> tuple[TuningResult, list[str]]:
    """Tune PoCL's cases in a folder with its descriptor."""
    if not (folder / "pocl.toml").exists():
        write_descriptor(folder, POCL, "a test", "cpu")
    said: list[str] = []
    asked = TuningRequest(**{"device": "pocl", "output": folder, "minutes": 5.0, **request})  # type: ignore[arg-type]
    return tune(asked, lambda stage, fraction: said.append(stage), every), said


@pytest.fixture(scope="module")
def pocl_table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TuningResult]:
    pytest.importorskip("pyopencl")
    from flashmem.runtime.opencl.discovery import list_devices

    if not any(device.descriptor_name == "pocl" for device in list_devices()):
        pytest.skip("PoCL is not installed")
    folder = tmp_path_factory.mktemp("tuned")
    result, _ = run(folder)
    return folder, result


def test_every_config_is_measured_or_says_why_not(pocl_table: tuple[Path, TuningResult]) -> None:
    folder, result = pocl_table
    assert (result.measured, result.left) == (2, 0)
    read = parse_database((folder / f"pocl{SUFFIX}").read_text(), "it")
    found = {(t.workload.family, t.config): t for t in read.timings}
    assert set(found) == {("matmul", v) for v in ("tile", "wide", "shared", "crowd", "greedy")} | {
        ("conv", v) for v in ("tile", "wide")
    }
    assert all((t.seconds is None) == (name in ("crowd", "greedy")) for (_, name), t in found.items())
    assert "work-groups of 16777216" in found["matmul", "crowd"].note
    assert "bytes of local memory" in found["matmul", "greedy"].note
    assert load_descriptor(str(result.descriptor)).tuned == str(folder / "pocl")
    assert summary(read, load_descriptor(str(result.descriptor))).startswith("2 products, soonest with ")
    assert sorted(path.name for path in folder.iterdir()) == ["pocl.toml", f"pocl{SUFFIX}"]


def test_tuning_again_measures_what_is_missing(pocl_table: tuple[Path, TuningResult]) -> None:
    folder, result = pocl_table
    again, said = run(folder)
    assert again.measured == 0 and not said and again.database.timings == parse_database(result.path.read_text(), "it").timings
    more, said = run(folder, (*CASES, Case(Matmul(3, 12, 20), "buffer")))
    assert more.measured == 1 and said == ["matmul 3x12x20, buffer"]
    assert more.database.timings[: len(again.database.timings)] == again.database.timings


def test_a_table_of_another_device_is_not_mixed(pocl_table: tuple[Path, TuningResult], tmp_path: Path) -> None:
    text = pocl_table[1].path.read_text()
    (tmp_path / f"pocl{SUFFIX}").write_text(text.replace('"driver": "', '"driver": "older '))
    with pytest.raises(UserError, match="was measured on another device or driver; finish it there, or use --fresh"):
        run(tmp_path)


def test_what_a_process_died_of_is_not_tried_again(pocl_table: tuple[Path, TuningResult], tmp_path: Path) -> None:
    workload, (_, wide) = CASES[1].workload, configs_of(POCL, "conv")
    (tmp_path / f".pocl{SUFFIX}.now").write_text(f"{workload} {wide.code}")
    result, _ = run(tmp_path, CASES[1:])
    notes = {t.config: (t.seconds is None, t.note) for t in result.database.timings}
    assert notes == {"tile": (False, ""), "wide": (True, "the process ended while it was measured")}


def test_no_product_is_begun_when_the_time_is_spent(pocl_table: tuple[Path, TuningResult], tmp_path: Path) -> None:
    result, said = run(tmp_path, minutes=0.0)
    assert (result.measured, result.left, said) == (0, 2, [])


@pytest.mark.thorough
def test_a_config_whose_kernel_is_wrong_has_no_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are wrong here, where a child compiles them: one is the soonest, then the next."""
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(pool, "WORKER", "tests.support.miscompiling_worker")
    monkeypatch.setenv(KERNEL, "__kernel")
    result, _ = run(tmp_path, CASES[:1])
    found = {each.config: each for each in result.database.timings}
    assert [each for each in found.values() if each.seconds is not None] == []
    assert all("the driver miscompiles it: " in found[name].note for name in ("tile", "wide", "shared"))


def test_nothing_to_choose_is_said(pocl_table: tuple[Path, TuningResult], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="device pocl lists no configs of attention, so there is nothing to choose"):
        run(tmp_path, families=("attention",))


def test_the_command_says_what_it_did(pocl_table: tuple[Path, TuningResult], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = pocl_table
    monkeypatch.setattr("flashmem.profiler.tuning.cases", lambda paths, **given: list(CASES))
    done = invoke("tune", "--device", str(folder / "pocl.toml"), "--minutes", "0.1")
    assert done.code == 0 and done.out.strip() == str(folder / "pocl.toml")
    assert invoke("tune", "--family", "cake").code == 2


# -- shapes


@pytest.mark.parametrize("shape", [Matmul(9, 12, 20), Convolution(4, 9, 9, 8, (3, 3), (2, 2)), Convolution(8, 4, 4, 8, (1, 1)),
                                   Batched(2, 5, 6, 7), Convolution(3, 16, 16, 8, (8, 8), (8, 8)),
                                   Attention(2, 9, 8), Attention(3, 1, 4, 20)], ids=str)  # fmt: skip
@pytest.mark.parametrize("path", ["buffer", "texture"])
def test_the_compiler_asks_for_the_product_that_is_measured(shape: Shape, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Workload] = []

    def config(
        self: KernelSelector, workload: Workload, ending: object = (), widest: int | None = None, *given: bool
    ) -> KernelConfig:
        asked.append(workload)
        return configs_of(POCL, workload.family)[0]

    monkeypatch.setattr(KernelSelector, "config", config)
    made = generated(shape.graph(), POCL.on_path(path))
    assert asked == [shape.workload(path)]  # type: ignore[arg-type]
    assert sum(launch.macs for launch in made.program.launches) * 2 == shape.flops


def test_products_in_tf32_are_measured_as_the_compiler_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Workload] = []
    config = KernelSelector.config
    monkeypatch.setattr(KernelSelector, "config", lambda self, *given: asked.append(given[0]) or config(self, *given))
    for shape in (Matmul(9, 12, 20), Convolution(4, 9, 9, 8, (3, 3), (2, 2))):
        generated(shape.graph(), load_descriptor("nvidia").on_path("buffer"), "tf32")
        assert asked.pop() == shape.workload("buffer", TF32)
    generated(Batched(2, 5, 6, 7).graph(), load_descriptor("nvidia"), "tf32")
    assert asked == [Batched(2, 5, 6, 7).workload("buffer")], "products of activations are in float32"
    found = cases(("buffer", "texture"), halves=True, tf32=True)
    assert len(set(found)) == len(found) and sum(case.storage == TF32 for case in found) > 50


def test_shapes_of_models() -> None:
    assert zoo_shapes("gptneo-125m") == {
        Matmul(128, 768, 768): 48, Matmul(128, 768, 3072): 12, Matmul(128, 3072, 768): 12, Matmul(128, 768, 50257): 1,
    }  # fmt: skip
    found = zoo_shapes("resnet50")
    assert sum(found.values()) == 54 and found[Convolution(256, 14, 14, 256, (3, 3))] == 5
    assert sum(shape.flops * count for shape, count in found.items()) == pytest.approx(8.2e9, rel=0.02)
    assert Matmul(4096, 320, 2560) in unet_shapes()
    assert Attention(8, 4096, 40).flops == 4 * 8 * 4096 * 4096 * 40
    assert len({case for case in cases(("texture", "buffer"))}) == len(cases(("texture", "buffer")))


# -- selection for a whole model


def test_few_kernels_are_part_of_the_cost() -> None:
    a, b, c = (PlainContraction(name, 1, 4, 4) for name in "abc")
    costs = [{a: 1.0, b: 1.25, c: 9.0}, {a: 1.3, b: 1.1, c: 9.0}, {a: 1.5, b: 9.0, c: 1.0}]
    assert fewest(costs, 0.0) == [a, b, c]
    assert fewest(costs, 0.3) == [a, a, c]
    assert fewest(costs, 5.0) == [a, a, a]
    assert fewest([{a: 1.0}, {b: 1.0}], 5.0) == [a, b]  # each is the only possible one


def test_cold_and_steady_choose_otherwise(tmp_path: Path) -> None:
    tile, wide, *_ = configs_of(POCL, "matmul")
    one, two = Workload("matmul", "buffer", 8, 64, 64), Workload("matmul", "buffer", 512, 64, 64)
    build = POCL.rates.kernel_seconds
    lines = [timing(one, tile, build), timing(one, wide, 1.1 * build), timing(two, tile, 9 * build), timing(two, wide, build)]
    descriptor = tuned(tmp_path, lines)
    for optimize, wanted in (("steady", [tile, wide]), ("cold", [wide, wide])):
        selector = KernelSelector(descriptor, optimize)  # type: ignore[arg-type]
        assert [selector.config(one), selector.config(two)] == [tile, wide]
        assert selector.select() == (optimize == "cold") and not selector.select()
        assert [selector.config(one), selector.config(two)] == wanted
    assert selector.config(replace(one, rows=9)) == wide  # a later request: the existing kernel


def test_the_predictor_is_told_the_config_and_older_ones_do_without(tmp_path: Path) -> None:
    made = generated(Matmul(9, 12, 20).graph(), replace(POCL, only="shared"))
    features = launch_features(made.program.launches[0], 0, "buffer")
    assert (features.tile_rows, features.tile_columns, features.k_block, features.slice_k) == (2, 4, 8, 2)
    row = dict(zip(KERNEL_FEATURES, kernel_features([features], [1.0])[0].tolist(), strict=True))
    assert row["log_k_block"] == pytest.approx(math.log2(9)) and row["log_slice_k"] == pytest.approx(math.log2(3))
    older = Predictor.load("pocl", "buffer")  # trained before configs were known
    assert older.seconds(made.program.launches[0]) > 0
    about, rows = read_dataset(ROOT / "devices" / f"pocl{DATASET}")
    assert {(r.features.k_block, r.features.slice_k) for r in rows} == {(0, 1)}
    write_dataset(tmp_path / "again", about, [replace(rows[0], features=features)])
    assert read_dataset(tmp_path / "again")[1][0].features == features


def test_the_last_panel_is_filled_up() -> None:
    staged = StagedContraction("s", 1, 4, (1, 32), k_block=8)
    assert packed_bytes(Workload("matmul", "buffer", 1, 10, 130), staged) == 10 * 256 * 4
    assert packed_bytes(Workload("matmul", "buffer", 1, 10, 3, storage="float16"), configs_of(POCL, "matmul")[0]) == 10 * 4 * 2
    assert packed_bytes(Workload("matmul_dynamic", "buffer", 1, 10, 130), staged) == 0


def test_both_give_the_same_answer(tmp_path: Path) -> None:
    import flashmem

    model = DATA / "vit-tiny.onnx"
    write_descriptor(tmp_path, with_configs(POCL, CONFIGS[:2]), "a test", "cpu")
    answers = []
    for optimize in ("cold", "steady"):
        device = str(tmp_path / "pocl.toml")
        bundle = flashmem.compile(
            model, tmp_path / f"{optimize}.flashmem", device=device, memory_path="buffer", optimize=optimize
        )
        with flashmem.Session(bundle) as session:
            inputs = {port.name: np.full(port.shape, 0.1, port.dtype) for port in bundle.program.inputs}
            answers.append(session.run(None, inputs)[0])
    assert np.allclose(*answers, rtol=1e-4, atol=1e-5) and math.isfinite(float(answers[0].sum()))
    with pytest.raises(UserError, match="optimize 'luke' is unknown; name one of: cold, steady"):
        flashmem.compile(model, optimize="luke")  # type: ignore[arg-type]
