"""The on-device half imports numpy, pyopencl and the standard library only; pip's OpenCL drivers are found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import flashmem
from flashmem.runtime.opencl import icd
from tests.support.mini_bundle import write_mini_bundle
from tests.support.paths import DATA

OFFLINE = (
    "ortools", "xgboost", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "jinja2", "rich", "google", "pandas",
    "flashmem.compiler", "flashmem.compile", "flashmem.planning.capacity", "flashmem.tools",
)  # fmt: skip

_REFUSING = """
import sys
blocked = sys.argv[-1].split(",")
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(name == module or name.startswith(module + ".") for module in blocked):
            raise ImportError(f"{name} is not for the online half")
sys.meta_path.insert(0, Refuse())
"""
"""The last argument names the modules that must not be imported."""

_RUN_BLOCKED = (
    _REFUSING
    + """
import numpy as np
import flashmem
with flashmem.Session(sys.argv[1]) as session:
    outputs = session.run(None, dict(np.load(sys.argv[2])))
np.savez(sys.argv[2] + ".out.npz", *outputs)
print(sorted({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)))
"""
)


def test_a_bundle_runs_with_the_offline_half_blocked(tmp_path: Path) -> None:
    model = write_mini_bundle(tmp_path / "m.flashmem")
    inputs = model.inputs()
    np.savez(tmp_path / "in.npz", **inputs)
    command = [sys.executable, "-c", _RUN_BLOCKED, str(model.path), str(tmp_path / "in.npz"), ",".join(OFFLINE)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    with np.load(tmp_path / "in.npz.out.npz") as outputs:
        np.testing.assert_allclose(outputs["arr_0"], model.reference(inputs)[0], rtol=0, atol=2e-5)


_REPLAN_BLOCKED = (
    _REFUSING
    + """
import flashmem
from flashmem.runtime.engine.inputs import complete_inputs
with flashmem.Runtime() as runtime:
    model = runtime.open(sys.argv[1])
    inputs = complete_inputs(model.bundle.program, {}, 0)
    (before,) = model.run(None, inputs)
    runtime.set_budget(model.loaded.smallest).result()
    (after,) = model.run(None, inputs)
    assert (before == after).all() and runtime.held <= runtime.budget
"""
)


def test_a_bundle_is_planned_again_with_the_offline_half_blocked(tmp_path: Path) -> None:
    bundle = flashmem.compile(DATA / "resnet-tiny.onnx", tmp_path / "m.flashmem")
    command = [sys.executable, "-c", _REPLAN_BLOCKED, str(bundle.path), ",".join(OFFLINE)]
    subprocess.run(command, check=True, capture_output=True, text=True)


def test_schedules_accounts_and_the_simulator_need_no_opencl() -> None:
    modules = (
        "schedule.loads",
        "schedule.residency",
        "program.lanes",
        "runtime.memory.accounts",
        "runtime.serving.sharing",
        "tools.simulation.simulator",
    )
    code = f"import sys; sys.modules['pyopencl'] = None\nfor m in {modules}: __import__('flashmem.' + m)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)


_COMPILE = """
import sys
import flashmem
flashmem.compile(sys.argv[1], sys.argv[2], device="generic-cpu", budget="64MB")
print(sorted({"ortools", "xgboost", "matplotlib", "onnxruntime"} & sys.modules.keys()))
"""


def test_a_solver_or_a_predictor_is_imported_only_where_it_runs(tmp_path: Path) -> None:
    model = DATA / "resnet-tiny.onnx"
    command = [sys.executable, "-c", _COMPILE, str(model), str(tmp_path / "m.flashmem")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def _icd(folder: Path, name: str, library: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(library + "\n")


def test_drivers_of_pip_are_listed_beside_the_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(icd.VARIABLE, raising=False)
    monkeypatch.setenv("PREFIX", str(tmp_path / "termux"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    (tmp_path / "venv/lib").mkdir(parents=True)
    (tmp_path / "venv/lib/libintelocl.so").write_bytes(b"")
    _icd(tmp_path / "termux/etc/OpenCL/vendors", "phone.icd", "libphone.so")
    _icd(tmp_path / "venv/etc/OpenCL/vendors", "intel.icd", "/nowhere/libintelocl.so")
    with icd.vendors_folder() as folder:
        assert folder is not None
        assert os.environ[icd.VARIABLE] == str(folder)
        listed = {file.read_text().strip() for file in folder.glob("*.icd")}
    assert {"libphone.so", str(tmp_path / "venv/lib/libintelocl.so")} <= listed
    assert "/nowhere/libintelocl.so" not in listed
    assert icd.VARIABLE not in os.environ
    assert not folder.exists()


def test_drivers_that_the_user_names_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(icd.VARIABLE, str(tmp_path))
    with icd.vendors_folder() as folder:
        assert folder is None
        assert os.environ[icd.VARIABLE] == str(tmp_path)


def test_no_driver_at_all_is_one_sentence(tmp_path: Path) -> None:
    code = "from flashmem.runtime.opencl.discovery import find_device; find_device()"
    environment = {**os.environ, icd.VARIABLE: str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "NoDeviceError: no OpenCL device is here; install a driver" in done.stderr
