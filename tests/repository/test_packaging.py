"""The checkout, the source distribution and the wheel: each contains the whole package; the wheel is installed and used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from flashmem.bundle.bundle import Bundle
from tests.support.paths import DATA, ROOT


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | variables
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def build(target: str, source: Path, folder: Path) -> Path:
    """The archive that hatchling builds from the tree in `source`, in the empty `folder`."""
    run(sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", folder, cwd=source)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the command of a release makes, with a bundle for one phone."""
    folder = tmp_path_factory.mktemp("release")
    words = (folder, "--model", DATA / "resnet-tiny.onnx", "--device", "adreno750")
    run(sys.executable, ROOT / "tools/build-release", *map(str, words), cwd=folder, PYTHONPATH=str(ROOT))
    return folder


@pytest.fixture(scope="module")
def sdist(released: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    (built,) = released.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        archive.extractall(folder, filter="data")
    (top,) = folder.iterdir()
    return top


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As pip builds it without a wheel: from the source distribution."""
    return build("wheel", sdist, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel, and with this environment's other packages; returns its Python.

    A .pth file after the new environment's own adds the other packages. A checkout installed there in editable mode is not
    visible: .pth files are not followed from .pth files.
    """
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    (site,) = [Path(line) for line in run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).split()]
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "zz-others.pth").write_text("".join(f"{path}\n" for path in others))
    return python


@pytest.mark.thorough
def test_a_release_has_both_wheels_the_sources_and_a_bundle(released: Path, wheel: Path, tmp_path: Path) -> None:
    archive = "resnet-tiny-adreno750.flashmem.zip"
    names = sorted(path.name for path in released.iterdir())
    phone = wheel.name.replace("flashmem-", "flashmem_runtime-")
    assert names == sorted([wheel.name, phone, wheel.name.replace("-py3-none-any.whl", ".tar.gz"), archive])
    assert (released / wheel.name).read_bytes() == wheel.read_bytes()
    zipfile.ZipFile(released / archive).extractall(tmp_path)
    assert Bundle.open(tmp_path / archive.removesuffix(".zip")).descriptor.name == "adreno750"


def test_everything_that_is_not_python_is_inside(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    folders = ("kernels", "profiler", "devices")
    expected = {f"flashmem/{file.relative_to(ROOT)}" for folder in folders for file in files_of(ROOT / folder)}
    assert expected, "nothing to look for"
    assert expected <= names
    assert "flashmem/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_the_checkout_and_the_source_distribution_give_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    one, other = (
        {entry.filename: entry.CRC for entry in zipfile.ZipFile(path).infolist()}
        for path in (wheel, build("wheel", ROOT, tmp_path))
    )
    assert one == other


def test_a_checkout_is_the_package_without_what_lies_beside_it(tmp_path: Path) -> None:
    editable = zipfile.ZipFile(build("wheel:editable", ROOT, tmp_path))
    (links,) = [name for name in editable.namelist() if name.endswith(".pth")]
    (folder,) = editable.read(links).decode().split()
    program = """
import importlib, importlib.util, json
from flashmem.base.resources import read_text
importlib.import_module("flashmem.profiler.dataset")
beside = ("flashmem", "benchmarks", "examples", "tests", "docs")
there = [name for name in beside if importlib.util.find_spec(f"flashmem.{name}")]
print(json.dumps([there, read_text("kernels", "templates/contraction/mac.cl.j2")]))
"""
    there, template = json.loads(run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=folder))
    assert there == []
    assert template == (ROOT / "kernels/templates/contraction/mac.cl.j2").read_text()


def test_nothing_else_is_inside(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert len(tops) == 2 and "flashmem" in tops, f"only the package and its metadata: {tops}"
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if "__pycache__" in name]


def test_the_installed_package_finds_its_resources(installed: Path, tmp_path: Path) -> None:
    program = """
import json, flashmem
from flashmem.target.descriptor import descriptor_names, load_descriptor
from flashmem.base.resources import read_text
names = [load_descriptor(name).name for name in descriptor_names()]
print(json.dumps([flashmem.__file__, names, read_text("kernels", "templates/contraction/mac.cl.j2")]))
"""
    file, names, template = json.loads(run(installed, "-c", program, cwd=tmp_path))
    assert not Path(file).is_relative_to(ROOT)
    assert names == sorted(path.stem for path in (ROOT / "devices").glob("*.toml"))
    assert template == (ROOT / "kernels/templates/contraction/mac.cl.j2").read_text()


def test_the_installed_command_compiles_and_runs_a_model(installed: Path, tmp_path: Path) -> None:
    command = installed.parent / "flashmem"
    model, bundle = ROOT / "tests/data/resnet-tiny.onnx", tmp_path / "model.flashmem"
    cache = str(tmp_path / "cache")
    printed = run(command, "compile", model, "-o", bundle, "--budget", "64MB", cwd=tmp_path, FLASHMEM_CACHE_DIR=cache)
    assert printed.strip() == str(bundle)
    report = json.loads(run(command, "run", bundle, "--verify", "--json", cwd=tmp_path, FLASHMEM_CACHE_DIR=cache))
    assert report["verify"]["ok"]
    assert 0 < report["memory"]["peak_bytes"] <= report["memory"]["budget_bytes"] == 64_000_000


def test_each_dependency_has_a_lower_bound() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    assert [line for line in wanted if ">=" not in line and not line.startswith("flashmem[")] == []
    assert set(extras) == {"compile", "desktop", "demo", "test", "bench", "gguf", "plots", "docs", "serve", "inputs"}


def files_of(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
