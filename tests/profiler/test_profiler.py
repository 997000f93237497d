"""The profiler and the predictor: drawn cases, measurements, datasets and training."""

from __future__ import annotations

import gzip
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashmem.base.errors import UserError
from flashmem.base.resources import names
from flashmem.compiler.operators import REGISTRY
from flashmem.planning.capacity.basis import Basis
from flashmem.planning.capacity.choice import default_model
from flashmem.planning.capacity.classes import load_capacity
from flashmem.planning.capacity.family import SHARES, FamilyPredictor
from flashmem.planning.capacity.features import FAMILIES, KERNEL_FEATURES, MAX_RATIO, kernel_features, launch_features
from flashmem.planning.capacity.model import SECONDS
from flashmem.planning.capacity.predictor import Predictor, ratio_within
from flashmem.planning.capacity.response import learn_classes
from flashmem.planning.capacity.roofline import Roofline
from flashmem.profiler.bench import Bench
from flashmem.profiler.cases import FAMILIES as DRAWN
from flashmem.profiler.cases import Target, sampled, sampled_family
from flashmem.profiler.dataset import Growing, Row, at_usual_pace, read_dataset, write_dataset
from flashmem.profiler.descriptor import write_descriptor
from flashmem.profiler.measure import _measure_launch
from flashmem.profiler.rates import lane_contention, measure_main_rates
from flashmem.profiler.report import agreement, held_out, repeats
from flashmem.profiler.train import save, train
from flashmem.program.launches import KernelShape, Launch
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.schedule.modes import MODES
from flashmem.target.descriptor import DeviceDescriptor, descriptor_names, load_descriptor
from tests.support.command_line import invoke
from tests.support.made_profile import BASIS, features, law
from tests.support.paths import ROOT

POCL = load_descriptor("pocl")


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return train(law(120), BASIS)


@pytest.mark.parametrize(("field", "limited"), [("gemm_flops", (64, 512, 900)), ("memory_bandwidth", (1, 4096, 2048))])
def test_a_trained_ratio_applies_to_the_roofline_of_another_processor(
    predictor: Predictor, field: str, limited: tuple[int, int, int]
) -> None:
    trained = replace(
        POCL.rates, gemm_flops=BASIS.gemm_flops, memory_bandwidth=BASIS.memory_bandwidth, launch_seconds=BASIS.launch_seconds,
        cached_bandwidth=BASIS.rate("buffer", "map"),
    )  # fmt: skip
    kernel = features(*limited)
    assert predictor.at(replace(trained, gemm_flops=1.004 * BASIS.gemm_flops), "map") is predictor
    half = predictor.at(replace(trained, **{field: getattr(trained, field) / 2}), "map")  # type: ignore[arg-type]
    twice = predictor.seconds_of(kernel) * (BASIS.roofline(kernel) * 2 - BASIS.launch_seconds) / BASIS.roofline(kernel)
    assert half.seconds_of(kernel) == pytest.approx(twice, rel=1e-9)
    faster = predictor.at(replace(trained, launch_seconds=5e-6, cached_bandwidth=15e9), "map")
    assert faster.streamable_of(kernel, 0.2, "map") > predictor.streamable_of(kernel, 0.2, "map")
    assert half.basis is predictor.basis


@pytest.mark.parametrize("device", list_devices(), ids=lambda device: device.descriptor_name)
def test_main_rates_are_those_of_a_profile(device: Device, tmp_path: Path) -> None:
    descriptor = descriptor_for(device)
    found = measure_main_rates(device, descriptor, tmp_path)
    assert (
        {"gemm_flops", "memory_bandwidth", "launch_seconds", "disk_bandwidth"} < found.keys() <= vars(descriptor.rates).keys()
    )
    for name, rate in found.items():  # a processor of today is not a hundred times as fast or slow
        assert 0.01 < rate / getattr(descriptor.rates, name) < 100, name
    assert not list(tmp_path.iterdir())


def launch_of(target: Target) -> tuple[Launch, int]:
    sizes = {part.name: part.nbytes for part in target.program.slices}
    return target.launch, sum(sizes[str(arg.value)] for arg in target.launch.args if arg.kind == "slice")


def test_every_family_is_drawn_and_says_what_it_does() -> None:
    assert set(DRAWN) == set(FAMILIES)
    seen = set()
    for index in range(27):
        family, _ = sampled_family(index)
        target = sampled(index, 0, POCL)
        if target is None:
            continue
        launch, weights = launch_of(target)
        made = launch_features(launch, weights, "buffer")
        seen.add(family)
        steps = made.macs / (made.rows * made.columns * made.depth)
        winograd = launch.shape.family == "conv" and steps != 1  # 16 multiplications instead of 36
        products = {"matmul": 1, "matmul_dynamic": 1, "depthwise": 1, "conv": 16 / 36 if winograd else 1, "attention": 2}
        assert steps == pytest.approx(products.get(family, 0)), (index, family)
        if len(target.program.launches) == 1:  # it writes the outputs, and reads the rest
            written = sum(4 * math.prod(tensor.shape) for tensor in target.program.outputs)
            assert made.own_bytes == launch.bytes - written + weights
        assert np.isfinite(kernel_features([made], [1e-3])).all()
    assert seen == set(DRAWN)


def test_features_by_hand() -> None:
    shape = KernelShape(family="matmul", rows=4, columns=8, depth=16, run=16, vector=4, special_ops=1)
    made = launch_features(
        Launch("l", "matmul_x", (2, 8), (1, 4), (), "reusable", (), 512, 4 * (4 * 16 + 4 * 8), shape), 512, "texture"
    )
    assert made.own_bytes == 4 * 4 * 16 + 512
    row = dict(zip(KERNEL_FEATURES, kernel_features([made], [0.25])[0].tolist(), strict=True))
    assert (row["is_matmul"], row["is_conv"], row["is_texture"]) == (1, 0, 1)
    assert (row["log_outputs_per_item"], row["log_roofline"], row["special_ops"]) == (1, -2, 1)
    assert row["log_macs"] == pytest.approx(np.log2(513))


def test_drawing_is_repeatable_and_a_seed_changes_it() -> None:
    shapes = [[t and t.launch.shape for t in (sampled(i, seed, POCL) for i in range(8))] for seed in (0, 0, 5)]
    assert shapes[0] == shapes[1] != shapes[2]


def test_a_known_law_is_learned(predictor: Predictor) -> None:
    held = law(40, seed=9)
    errors = []
    for row in held:
        expected = row.seconds * row.slowdown
        found = predictor.seconds_of(row.features) * (
            predictor.slowdown_of(row.features, row.streamed_bytes, "map") if row.mode == "map" else 1
        )
        errors.append(abs(found / expected - 1))
    assert np.median(errors) < 0.05 and np.mean(errors) < 0.1


def test_latency_never_falls_as_more_is_streamed(predictor: Predictor) -> None:
    for row in law(20, seed=3):
        shape = KernelShape("matmul", row.features.rows, row.features.columns, row.features.depth, row.features.run, 1, 16)
        launch = Launch(
            "l", "matmul_x", (row.features.items,), (1,), (), "reusable", (), row.features.macs, row.features.bytes, shape
        )
        own = row.features.own_bytes
        loaded = [predictor.loaded_seconds(launch, row.features.weight_bytes, own * r, "map") for r in np.linspace(0, 5, 101)]
        assert all(later >= earlier for earlier, later in pairwise(loaded))
        assert loaded[0] == predictor.seconds(launch, row.features.weight_bytes)
        some = predictor.streamable_bytes(launch, row.features.weight_bytes, 0.2, "map")
        assert 0 <= some <= MAX_RATIO * own
        assert predictor.loaded_seconds(launch, row.features.weight_bytes, some, "map") <= 1.2001 * loaded[0]


def test_an_unprofiled_mode_is_refused(predictor: Predictor) -> None:
    with pytest.raises(UserError, match="knows no transfer mode 'dma' on the buffer path"):
        predictor.slowdown_curve(features(8, 8, 8), "dma")


def test_where_a_curve_crosses_a_threshold() -> None:
    ratios, factors = np.array([0.0, 1.0, 2.0]), np.array([1.0, 1.1, 1.5])
    assert ratio_within(ratios, factors, 0.2) == pytest.approx(1.25)
    assert ratio_within(ratios, factors, 3.0) == 2.0
    assert ratio_within(ratios, factors + 1, 0.2) == 0.0


def test_the_model_lies_beside_its_descriptor(predictor: Predictor, tmp_path: Path) -> None:
    save(predictor, tmp_path / "mine")
    written = write_descriptor(tmp_path, replace(POCL, name="mine", capacity_model="mine", measured=True), "a test", "cpu")
    descriptor = load_descriptor(str(written))
    assert descriptor.measured and descriptor.tile == POCL.tile and descriptor.modes == POCL.modes
    model = default_model(descriptor, "buffer")
    assert "a law made up for a test" in model.note
    launch, weights = launch_of(_target("matmul"))
    assert load_capacity(model, launch, weights, "map") // 4096 > 0
    assert model.seconds(launch, weights) == predictor.at(descriptor.rates, "map").seconds(launch, weights)
    (tmp_path / "mine.slowdown.ubj").write_bytes(b"not a model")
    with pytest.raises(UserError, match=r"mine\.slowdown\.ubj cannot be read"):
        default_model(descriptor, "buffer")


def test_without_a_model_the_note_says_so() -> None:
    model = default_model(DeviceDescriptor("plain"), "buffer")
    assert isinstance(model, Roofline) and "plain has no trained model" in model.note


@pytest.mark.parametrize("name", descriptor_names())
def test_a_capacity_is_the_most_that_keeps_a_launch_within_its_class(name: str) -> None:
    """With any amount up to C_l a launch stays within its threshold. With a little more it does not, or the amount could not be
    transferred while it runs (roofline), or was not profiled (predictor).
    """
    descriptor = load_descriptor(name)
    for path in descriptor.memory_paths:
        model = default_model(descriptor, path)
        named = FamilyPredictor if descriptor.pipelines else Predictor if descriptor.capacity_model else Roofline
        assert isinstance(model, named)
        for family in ("matmul", "conv", "elementwise", "reduce_rows"):
            launch, weights = launch_of(_target(family, descriptor.on_path(path)))
            allowed = (1 + {"hierarchical": 0.0, "reusable": 0.2, "elemental": 3.0}[launch.operator_class]) * model.seconds(
                launch, weights
            )
            for mode in descriptor.modes[path]:
                found = load_capacity(model, launch, weights, mode)
                if launch.operator_class == "hierarchical":
                    assert found == 0
                    continue
                for amount in np.linspace(0, found, 33):
                    assert model.loaded_seconds(launch, weights, float(amount), mode) <= allowed * (1 + 1e-6)
                last = MODES[mode].last_bandwidth(descriptor.rates)
                most = (
                    MAX_RATIO * launch_features(launch, weights, path).own_bytes
                    if isinstance(model, Predictor)
                    else SHARES[-1] * model.seconds(launch, weights) * last
                    if isinstance(model, FamilyPredictor)
                    else allowed * last
                )
                more = found + 1e-3 * most
                assert more > most or model.loaded_seconds(launch, weights, more, mode) > allowed, (path, family, mode)


@pytest.mark.parametrize("name", [name for name in descriptor_names() if name in names("devices", SECONDS)])
def test_shipped_models_predict_what_was_measured(name: str) -> None:
    """For their training launches, at the usual pace: half of them within a tenth; the roofline has larger errors."""
    about, rows = read_dataset(ROOT / f"devices/{name}.profile.csv.gz")
    basis = Basis(**about["basis"])
    alone = [row for row in at_usual_pace(rows, basis) if row.mode == "none"][::30]
    trained, roofline = [], []
    for row in alone:
        model = default_model(load_descriptor(name), row.features.memory_path)
        assert isinstance(model, Predictor)
        trained.append(abs(model.seconds_of(row.features) / row.seconds - 1))
        roofline.append(abs(basis.roofline(row.features) / row.seconds - 1))
    assert len(alone) > 50
    assert np.median(trained) < 0.1 < np.median(roofline)


def _target(family: str, descriptor: DeviceDescriptor = POCL) -> Target:
    for index in range(200):
        if sampled_family(index)[0] == family and (target := sampled(index, 0, descriptor)) is not None:
            return target
    raise AssertionError(family)


def test_a_killed_profile_goes_on_without_half_a_launch(tmp_path: Path) -> None:
    path, about, rows = tmp_path / "x.csv", {"device": "one\ntwo, three", "seed": 0}, law(3)
    growing = Growing(path, about, resume=True)
    growing.append(rows[:5])
    growing.append(rows[5:10])
    text = path.read_text()
    path.write_text(text[: text.rindex(",")])  # killed in the middle of the second launch's last line
    again = Growing(path, about, resume=True)
    assert again.cases == {rows[0].case}
    again.append(rows[5:10])
    found = Growing(path, about, resume=True).rows
    assert [(r.case, r.mode, r.features) for r in found] == [(r.case, r.mode, r.features) for r in rows[:10]]
    assert [r.seconds for r in found] == pytest.approx([r.seconds for r in rows[:10]], rel=1e-5)
    with pytest.raises(UserError, match="another device or with another seed"):
        Growing(path, {**about, "seed": 1}, resume=True)
    assert Growing(path, {**about, "seed": 1}, resume=False).rows == []


def test_a_dataset_survives_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "x.profile.csv.gz"
    write_dataset(path, {"source": "s"}, law(2))
    about, rows = read_dataset(path)
    assert about == {"source": "s"} and [r.features for r in rows] == [r.features for r in law(2)]
    path.write_bytes(gzip.compress(b"# {}\na,b\n1,2\n"))
    with pytest.raises(UserError, match="profile the device again"):
        read_dataset(path)


def test_latencies_are_those_of_the_usual_pace() -> None:
    plain = law(60)
    slow = 1.5  # every other launch was measured while the machine was slower by half
    names = sorted({row.case for row in plain})[::2]
    paced = [
        replace(row, seconds=row.seconds * slow, gemm_pace=slow, traffic_pace=slow) if row.case in names else row
        for row in plain
    ]
    before = spread(plain, paced)
    after = spread(plain, at_usual_pace(paced, BASIS))
    assert after < 0.5 * before
    assert at_usual_pace(plain, BASIS) == plain


def spread(true: list[Row], found: list[Row]) -> float:
    """The spread of the ratios of latencies to the true ones: largest over smallest, minus one."""
    ratios = [b.seconds / a.seconds for a, b in zip(true, found, strict=True)]
    return max(ratios) / min(ratios) - 1


def test_two_profiles_of_one_device_are_compared(tmp_path: Path) -> None:
    """Twice as slow altogether is the machine's pace, not a difference; every fourth launch a tenth slower is a difference."""
    about = {"source": "s", "basis": vars(BASIS)}
    first, second = tmp_path / "a.profile.csv.gz", tmp_path / "b.profile.csv.gz"
    plain = law(60)
    odd = sorted({row.case for row in plain})[::4]
    write_dataset(first, about, plain)
    write_dataset(second, about, [replace(row, seconds=row.seconds * (2.2 if row.case in odd else 2.0)) for row in plain])
    found = repeats(first, second)
    assert len(found.differences) == 60 and len(found.capacities) == 60
    assert [difference for difference in found.differences if difference > 1e-4] == pytest.approx([0.1] * 15, rel=1e-3)
    assert agreement(found.capacities, None) == 1.0
    write_dataset(second, about, law(60, seed=1))
    with pytest.raises(UserError, match="no launch in common"):
        repeats(first, second)


def test_nothing_found_where_nothing_is_is_no_hit() -> None:
    chunk = 1 << 20
    pairs = [(0.0, 0.0), (0.9 * chunk, 0.5 * chunk), (8.0 * chunk, 7.5 * chunk), (0.0, 3.0 * chunk)]
    assert agreement(pairs, None) == pytest.approx(1 / 3)  # the first has nothing to predict, two are missed
    assert agreement(pairs, chunk) == 0.5
    assert np.isnan(agreement(pairs[:2], chunk))


@pytest.mark.thorough
def test_what_is_held_out_was_not_seen_and_is_judged_as_measured(tmp_path: Path) -> None:
    """A model's launches that were also drawn for training do not test what was learned from the others."""
    dataset = tmp_path / "x.profile.csv.gz"
    rows = law(100)
    first = [row for row in rows if row.case in {f"case0-{i}" for i in range(30)}]
    model = [replace(row, origin="net", case=f"net-{row.case}", seconds=row.seconds * 1.5, gemm_pace=2.0) for row in first]
    about = {"source": "s", "basis": vars(BASIS), "rates": {"rates": vars(POCL.rates), "mode_rates": BASIS.mode_rates}}
    write_dataset(dataset, about, [*rows, *model])
    part = held_out(dataset)[-1]
    assert part.what == "net" and part.alike == 30 and len(part.predictions) == len(model)
    for found, row in zip(part.predictions, model, strict=True):
        assert found.raw == pytest.approx(row.seconds * row.slowdown, rel=1e-4)
        assert found.measured <= found.raw * (1 + 1e-9)  # the machine was slower than usual, which lowers the result


def test_too_little_teaches_nothing() -> None:
    for count in (0, 3):
        with pytest.raises(UserError, match=f"^{count} launches are too few"):
            train(at_usual_pace(law(count), BASIS), BASIS)
    with pytest.raises(UserError, match="bytes streamed during it"):
        train([row for row in law(30) if row.mode == "none"], BASIS)


def test_lane_contention_is_the_share_by_which_a_transfer_delays() -> None:
    rows = [replace(row, mode="interleave") if row.mode == "map" else row for row in law(200)]
    rates = {"buffer interleave": BASIS.mode_rates["buffer map"]}
    assert lane_contention(rows, rates, "buffer") == pytest.approx(0.5)
    assert lane_contention(law(200), rates, "buffer") is None


def test_classes_are_cut_where_tolerance_leaves_gaps() -> None:
    tolerances = {"Conv": [2.0, 2.2], "MatMul": [1.9], "Relu": [0.5, 0.4], "Softmax": [0.02], "Add": [0.6]}
    learned = learn_classes(tolerances, {operator: REGISTRY[operator].operator_class for operator in tolerances})
    found = {entry.operator: entry.learned for entry in learned}
    assert found == {
        "Conv": "reusable", "MatMul": "reusable", "Relu": "elemental", "Add": "elemental", "Softmax": "hierarchical",
    }  # fmt: skip
    assert all(entry.agrees for entry in learned)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report"], "--report needs --dataset"),
        (["--again", "x.profile.csv.gz"], "--again need --report"),
        (["--dataset", "nowhere.profile.csv.gz"], "no such dataset"),
        (["--model", "nowhere.onnx"], "does not exist"),
        (["--name", "a/b"], "cannot be a file's name"),
        (["--device", "nosuchdevice"], "no OpenCL device is called"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = invoke("profile", "-o", str(tmp_path), *arguments)
    assert result.code == 2 and message in result.err and result.err.count("\n") == 1


CASES = [
    pytest.param(device, path, id=f"{device.descriptor_name}-{path}")
    for device in list_devices()
    for path in descriptor_for(device).memory_paths
]


@pytest.mark.parametrize(("device", "path"), CASES)
def test_launches_are_measured_on_every_device(device: Device, path: Any, tmp_path: Path) -> None:
    descriptor = descriptor_for(device).on_path(path)
    with Bench(device, descriptor, tmp_path) as bench:
        for mode in descriptor.modes[path]:
            assert 1e7 < bench.loads.transfer_rate(mode) < 1e12, "bytes a second, of a memory"
        for number, family in enumerate(("elementwise", "reduce_rows", "gather")):
            alone, *loaded = _measure_launch(bench, _target(family, descriptor), (0.5, 2.0), number, bench.pace)
            assert alone.mode == "none" and (alone.streamed_bytes, alone.slowdown) == (0.0, 1.0)
            assert 1e-7 < alone.seconds < 0.05 + alone.features.bytes / 1e8, "seconds of one launch, not of a burst"
            assert all(1e-6 < pace < 1 for pace in (alone.gemm_pace, alone.traffic_pace)), "seconds of a reference launch"
            assert {row.mode for row in loaded} <= set(descriptor.modes[path])
            for row in loaded:
                assert (row.features, row.seconds) == (alone.features, alone.seconds)
                assert 0 < row.streamed_bytes <= 3 * alone.features.own_bytes + (1 << 20)
    assert list(tmp_path.iterdir()) == [], "the file to stream from is removed"
