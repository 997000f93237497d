"""The on-device half with only numpy and pyopencl: run, learn, plan again, profile, find the driver."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import numpy as np
import pytest

import flashmem
from flashmem.base.errors import MissingFileError, UserError
from flashmem.profiler import kit as kits
from flashmem.profiler import openings, packing
from flashmem.profiler.dataset import read_dataset
from flashmem.profiler.kit import Kit
from flashmem.profiler.run import retrain
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.target.descriptor import load_descriptor
from tests.repository.test_packaging import ROOT, build
from tests.support.gguf_models import SmallLlama

MODEL = ROOT / "tests/data/resnet-tiny.onnx"
CPUS = [device for device in list_devices() if device.kind == "cpu" and device.descriptor_name in ("pocl", "intel-cpu")]
if not CPUS:
    pytest.skip("a kit is for a device with a descriptor of its own", allow_module_level=True)
DEVICE = CPUS[0]
NUMBER = str(list_devices().index(DEVICE))
ALLOWED = ("numpy", "pyopencl", "pytools", "platformdirs", "typing_extensions", "importlib_resources", "siphash24", "mako")
"""Also the dependencies of pyopencl."""

_ONLY = """
import importlib.util, os, sys
wheel, allowed = sys.argv[1], sys.argv[2].split(",")
class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in allowed and top != "flashmem" and not top.startswith("_"):
            raise ModuleNotFoundError(f"{name} is not on a phone", name=name)
sys.meta_path.insert(0, Refuse())
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.partition(".")[0] == "rich" else real(name, *rest)
sys.path.insert(0, wheel)
import flashmem
assert flashmem.__file__.startswith(wheel), flashmem.__file__
"""

_COMMAND = (
    _ONLY
    + """
sys.argv = ["flashmem", *sys.argv[3:]]
from flashmem.__main__ import main
main()
"""
)

_MEASURE = (
    _ONLY
    + """
from flashmem.profiler import bench, loads, measure, rates, sessions
loads.PARTS = bench.PARTS = rates.PARTS = 8
bench._POOL_BYTES = 16 << 20
bench.REFERENCE_GEMM = rates.DELAYED_GEMM = (32, 64, 64)
rates.CPU_GEMMS, rates.TRAFFIC_ELEMENTS = ((32, 64, 64),), 1 << 16
bench._DELAYS, bench._ALONE, bench._REPEATS, sessions._ROUNDS, measure.LEAST_LAUNCHES = 2, 2, 1, 1, 4
measure._SAMPLE_RATIOS, measure._MODEL_RATIOS = (0.4,), ()
sys.argv = ["flashmem", *sys.argv[3:]]
from flashmem.__main__ import main
main()
"""
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for phones, built with the packages of this environment."""
    return build("wheel", ROOT / "packaging/runtime", tmp_path_factory.mktemp("runtime"))


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phone")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "m.flashmem"
    flashmem.compile(MODEL, path, device=DEVICE.descriptor_name, budget="4MB", build=False)
    return path


def phone(unpacked: Path, cache: Path, *words: object, program: str = _COMMAND) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", program, str(unpacked), ",".join(ALLOWED), *map(str, words)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"FLASHMEM_CACHE_DIR": str(cache), "PYTHONPATH": str(unpacked)}
    return subprocess.run(command, env=environment, cwd=cache, capture_output=True, text=True, check=False)


def test_the_wheel_is_small_and_asks_for_two_packages(wheel: Path) -> None:
    assert round(wheel.stat().st_size / 1e6, 1) <= 0.7  # MB, as README and docs/how-to/phones.md say
    names = zipfile.ZipFile(wheel).namelist()
    (metadata,) = [name for name in names if name.endswith("/METADATA")]
    said = Parser().parsestr(zipfile.ZipFile(wheel).read(metadata).decode())
    wanted = {re.split(r"[<>=]", line)[0].strip() for line in said.get_all("Requires-Dist", [])}
    assert (said["Name"], wanted) == ("flashmem-runtime", {"numpy", "pyopencl"})
    for part in ("flashmem/compiler/", "flashmem/compile.py", "flashmem/kernels/", "paper", ".ubj", ".csv"):
        assert not [name for name in names if part in name], part
    descriptors = {Path(name).stem for name in names if name.endswith(".toml")}
    assert descriptors == {path.stem for path in (ROOT / "devices").glob("*.toml")}


def test_descriptors_come_without_where_their_numbers_are_from(unpacked: Path) -> None:
    for path in sorted((ROOT / "devices").glob("*.toml")):
        desk, there = (tomllib.loads(file.read_text()) for file in (path, unpacked / "flashmem/devices" / path.name))
        assert desk.pop("sources") and there == desk, path.name


def test_the_wheel_has_the_version_of_the_whole() -> None:
    files = ("pyproject.toml", "packaging/runtime/pyproject.toml")
    one, other = (tomllib.loads((ROOT / file).read_text())["project"] for file in files)
    assert one["version"] == other["version"] == flashmem.__version__
    assert set(other["dependencies"]) <= set(one["dependencies"])


@pytest.mark.thorough
def test_a_phone_runs_learns_and_plans_again(unpacked: Path, bundle: Path, tmp_path: Path) -> None:
    inputs = tmp_path / "x.npz"
    rng = np.random.default_rng(0)
    ports = flashmem.Bundle.open(bundle).program.inputs
    np.savez(inputs, **{port.name: rng.standard_normal(port.shape).astype(port.dtype) for port in ports})
    words = ("run", bundle, "--input", inputs, "--device", DEVICE.descriptor_name, "--json")
    first = phone(unpacked, tmp_path, *words, "--output", tmp_path / "y.npz", "--repeat", "2", "--learn")
    assert first.returncode == 0, first.stderr
    assert "planned again from what was measured" in first.stderr
    needed = json.loads(first.stdout)["memory"]["peak_bytes"]
    again = phone(unpacked, tmp_path, "replan", bundle, "--budget", needed * 2, "-o", tmp_path / "other.flashmem")
    assert again.returncode == 0, again.stderr
    assert again.stdout.strip() == str(tmp_path / "other.flashmem")
    words = ("run", tmp_path / "other.flashmem", "--input", inputs, "--device", DEVICE.descriptor_name)
    second = phone(unpacked, tmp_path, *words, "--output", tmp_path / "z.npz")
    assert second.returncode == 0, second.stderr
    assert "first answer" in second.stdout and flashmem.Bundle.open(tmp_path / "other.flashmem").budget_bytes == needed * 2
    with np.load(tmp_path / "y.npz") as one, np.load(tmp_path / "z.npz") as other:
        assert all(np.array_equal(one[name], other[name]) for name in one.files)
    small = phone(unpacked, tmp_path, "replan", bundle, "--budget", "1000")
    assert (
        small.returncode == 2 and "raise the budget to" in small.stderr and "compile the model for this budget" in small.stderr
    )
    assert phone(unpacked, tmp_path, "check", bundle).returncode == 0


def test_a_phone_generates_text(unpacked: Path, tmp_path: Path) -> None:
    """The tokenizer and the chat template are in the bundle."""
    made = flashmem.compile(
        SmallLlama(layers=1).write(tmp_path / "m.gguf"), tmp_path / "m.flashmem", device=DEVICE.descriptor_name
    )
    words = ("generate", made.path, "It's 37.5", "--max-new-tokens", "5", "--device", DEVICE.descriptor_name, "--json")
    said = phone(unpacked, tmp_path, *words)
    assert said.returncode == 0, said.stderr
    with flashmem.Generator(made, device=DEVICE.descriptor_name) as generator:
        text = "".join(generator.generate([{"role": "user", "content": "It's 37.5"}], max_new_tokens=5))
    assert json.loads(said.stdout)["text"] == text


def test_a_plan_of_the_paper_s_objective_is_made_on_a_desk(unpacked: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.flashmem"
    flashmem.compile(MODEL, path, device=DEVICE.descriptor_name, objective="paper", build=False)
    done = phone(unpacked, tmp_path, "replan", path, "--budget", "4MB")
    assert done.returncode == 2 and "plan it where the compiler is" in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_phone_has_the_names_of_the_package(unpacked: Path, tmp_path: Path) -> None:
    """All of `flashmem.__all__` that needs no compiler can be imported."""
    program = _ONLY + "print(*[getattr(flashmem, name).__name__ for name in flashmem.__all__ if name[0].isupper()])"
    done = phone(unpacked, tmp_path, program=program)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {name for name in flashmem.__all__ if name[0].isupper()}


def test_a_phone_lists_the_commands_that_it_has(unpacked: Path, tmp_path: Path) -> None:
    done = phone(unpacked, tmp_path, "--help")
    listed = {line.split()[0] for line in done.stdout.splitlines() if re.match(r"  \w", line)}
    assert listed == {"devices", "doctor", "run", "generate", "check", "verify", "replan", "profile", "cache"}
    missing = phone(unpacked, tmp_path, "compile", MODEL)
    assert missing.returncode == 2 and "flashmem compile is not installed here" in missing.stderr


def test_a_phone_has_a_doctor(unpacked: Path, tmp_path: Path) -> None:
    done = phone(unpacked, tmp_path, "doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {each["name"] for each in report["devices"]} == {device.name for device in list_devices()}


def test_a_phone_has_the_steps_of_the_phone_kit(unpacked: Path, tmp_path: Path) -> None:
    """Each is run in a test of its own with all packages (tests/profiler/phone_kit); here it is imported with a phone's."""
    modules = ("measuring", "rates", "heat", "storage")
    program = _ONLY + "".join(f"import flashmem.profiler.phone_kit.{name}\n" for name in modules)
    program += "import flashmem.runtime.opencl.probes, flashmem.tools.verify\n"
    done = phone(unpacked, tmp_path, program=program)
    assert done.returncode == 0, done.stderr


def test_compiling_is_refused_in_one_sentence(unpacked: Path, tmp_path: Path) -> None:
    done = phone(unpacked, tmp_path, "run", MODEL)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.fixture(scope="module")
def small_kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        small = {"REFERENCE_GEMM": (32, 64, 64), "DELAYED_GEMM": (32, 64, 64), "CPU_GEMMS": ((32, 64, 64),)}
        for name, value in {**small, "TRAFFIC_ELEMENTS": 1 << 16}.items():
            patch.setattr(packing, name, value)
        patch.setattr(openings, "_KERNELS", 2)
        patch.setattr(openings, "_LAYERS", 3)
        path = tmp_path_factory.mktemp("kit") / "x.kit"
        descriptor = load_descriptor(DEVICE.descriptor_name)
        return packing.write_kit(path, descriptor, [MODEL], 0, lambda what, done: None, kernels=4)


@pytest.mark.thorough
def test_a_phone_measures_and_a_desk_trains(
    unpacked: Path, small_kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "profile",
        "--measure",
        small_kit,
        "-o",
        tmp_path,
        "--device",
        DEVICE.descriptor_name,
        "--minutes",
        "5",
        "--name",
        "mine",
    )
    done = phone(unpacked, tmp_path, *words, program=_MEASURE)
    assert done.returncode == 0, done.stderr
    dataset = tmp_path / "mine.profile.csv.gz"
    assert done.stdout.strip() == str(dataset)
    about, rows = read_dataset(dataset)
    assert {row.origin for row in rows} == {"sample", "resnet-tiny"} and about["rates"]["rates"]["gemm_flops"] > 1e5
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]
    train = sys.modules["flashmem.profiler.train"]
    for number, value in (("LEAST_LAUNCHES", 4), ("_SECONDS_ROUNDS", 5), ("_SLOWDOWN_ROUNDS", 5)):
        monkeypatch.setattr(train, number, value)
    path = retrain(dataset)
    assert path == tmp_path / "mine.toml"
    descriptor = load_descriptor(str(path))
    assert descriptor.measured and descriptor.name == "mine" and descriptor.sources["gemm_flops"] == about["source"]


def test_a_kit_gives_the_launches_that_the_compiler_makes(small_kit: Path) -> None:
    kit = Kit(small_kit)
    assert kit.descriptor.name == DEVICE.descriptor_name
    for path in kit.descriptor.memory_paths:
        made, held = packing.Made(load_descriptor(DEVICE.descriptor_name).on_path(path)), kit.supply(path)
        for target, other in (
            (made.matmul(32, 64, 64), held.matmul(32, 64, 64)),
            (made.elementwise(64), held.elementwise(64)),
        ):
            assert (target.launch, target.source, target.program) == (other.launch, other.source, other.program)
            assert target.constants.tobytes() == other.constants.tobytes()
    assert held.count == 4


def test_what_is_no_kit_is_refused(small_kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingFileError, match="no such kit"):
        Kit(tmp_path / "nowhere.kit")
    for content in (b"", b"PK\3\4 a zip", small_kit.read_bytes()[:2000]):
        (tmp_path / "bad.kit").write_bytes(content)
        with pytest.raises(UserError, match="is not a kit"):
            Kit(tmp_path / "bad.kit")
    with pytest.raises(UserError, match="has no matmul of 1x2x3"):
        Kit(small_kit).supply(Kit(small_kit).descriptor.memory_paths[0]).matmul(1, 2, 3)
    monkeypatch.setattr(kits, "FORMAT_VERSION", 999)
    with pytest.raises(UserError, match="this flashmem reads 999"):
        Kit(small_kit)
