"""Makes a phone kit, where the compiler and ONNX Runtime are: one file for `python FILE` on the phone."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import flashmem
from flashmem.base.errors import BudgetError, UserError
from flashmem.base.files import written_whole
from flashmem.base.version import __version__
from flashmem.target.descriptor import DeviceDescriptor, load_descriptor
from flashmem.tools.verify import check_installed, reference

from ..packing import write_kit
from . import start
from .contents import ABOUT, OTHER, STREAMED, VERSION
from .models import KitModel, blocks, families, half, streamed

PHONES = (
    "adreno540", "adreno730", "adreno740", "adreno750", "adreno830", "mali-g710", "mali-g715", "mali-g720", OTHER,
)  # fmt: skip
"""The devices of a kit, unless others are named."""

KERNELS = 60
"""Sampled launches for each device: about as many as a phone measures in the time."""

_PACKAGING = Path(__file__).resolve().parents[2] / "packaging/runtime"
_DATE = (1980, 1, 1, 0, 0, 0)

Progress = Callable[[str, float], None]


def make_models() -> tuple[KitModel, ...]:
    """The models of a kit."""
    return families(), half(), blocks(), streamed()


def write_phone_kit(
    path: Path,
    devices: Sequence[str],
    progress: Progress,
    *,
    models: Sequence[KitModel] | None = None,
    kernels: int = KERNELS,
) -> Path:
    """Write a kit for `devices` (names of descriptors) to `path`, and return it.

    Raises:
        UserError: ONNX Runtime or hatchling is not installed, this is no checkout, or a device is unknown.
    """
    check_installed()
    descriptors = [load_descriptor(name) for name in devices]
    with tempfile.TemporaryDirectory(prefix="flashmem-phone-kit-") as name:
        folder = Path(name)
        _unpack_wheel(folder / "library")
        made = list(models or make_models())
        onnx_files = {model.name: _save_model(model, folder / "models") for model in made}
        about: dict[str, Any] = {"version": VERSION, "flashmem": __version__, "devices": {}}
        for number, descriptor in enumerate(descriptors):
            progress(descriptor.name, number / len(descriptors))
            about["devices"][descriptor.name] = _for_device(descriptor, made, onnx_files, folder, kernels)
        for model_file in onnx_files.values():
            model_file.unlink()
        return _write(path, folder, about)


def _save_model(model: KitModel, folder: Path) -> Path:
    """Write a model, its inputs and the right answers; returns the path of the model."""
    folder.mkdir(exist_ok=True)
    path = model.save(folder)
    names = [output.name for output in model.proto.graph.output]
    np.savez_compressed(folder / f"{model.name}-inputs.npz", **model.inputs)  # type: ignore[arg-type]
    plain = model.save_plain(folder)
    answers = dict(zip(names, reference(plain, model.inputs, names), strict=True))
    plain.unlink()
    np.savez_compressed(folder / f"{model.name}-answers.npz", **answers)
    return path


def _for_device(
    descriptor: DeviceDescriptor, models: Sequence[KitModel], onnx_files: dict[str, Path], folder: Path, kernels: int
) -> dict[str, Any]:
    """Write launches and bundles for a device; returns its entry in kit.json."""
    launches = f"launches/{descriptor.name}.kit"
    (folder / "launches").mkdir(exist_ok=True)
    write_kit(folder / launches, descriptor, [], 0, lambda what, done: None, kernels=kernels)
    bundles = []
    for memory_path in descriptor.memory_paths:
        for model in models:
            target = f"bundles/{descriptor.name}/{model.name}-{memory_path}.flashmem"
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            _compile(onnx_files[model.name], folder / target, descriptor.name, memory_path, model)
            bundles.append({"model": model.name, "memory_path": memory_path, "folder": target, "precision": model.precision})
    return {"launches": launches, "bundles": bundles}


def _compile(source: Path, target: Path, device: str, memory_path: Any, model: KitModel) -> None:
    """Compile with an M_peak of half the weights, or the least that works; a quarter of the model to stream."""
    options: dict[str, Any] = {"device": device, "memory_path": memory_path, "precision": model.precision, "build": False}
    made = flashmem.compile(source, target, **options)
    nbytes = sum(part.nbytes for part in made.program.slices)
    try:
        flashmem.compile(source, target, m_peak=nbytes // (4 if model.name == STREAMED else 2), **options)
    except BudgetError as error:
        flashmem.compile(source, target, m_peak=error.smallest_bytes, **options)


def _unpack_wheel(folder: Path) -> None:
    """Build the wheel `flashmem-runtime` and unpack it into `folder`."""
    if not (_PACKAGING / "pyproject.toml").is_file():
        raise UserError("a phone kit is made in a checkout of flashmem's repository; clone it, and run this there")
    with tempfile.TemporaryDirectory() as built:
        command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", built]
        done = subprocess.run(command, cwd=_PACKAGING, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            raise UserError(f"the wheel cannot be built ({lines[-1] if lines else 'no reason given'}); pip install hatchling")
        [wheel] = Path(built).iterdir()
        zipfile.ZipFile(wheel).extractall(folder)


def _write(path: Path, folder: Path, about: dict[str, Any]) -> Path:
    """Write the zip file: start.py as `__main__.py`, each content once, and kit.json."""
    content = io.BytesIO()
    files: dict[str, str] = {}
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:

        def add(name: str, data: bytes) -> None:
            archive.writestr(zipfile.ZipInfo(name, _DATE), data, zipfile.ZIP_DEFLATED)

        add("__main__.py", Path(start.__file__).read_bytes())
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            data = file.read_bytes()
            blob = hashlib.sha256(data).hexdigest()
            if blob not in files.values():
                add(f"blobs/{blob}", data)
            files[file.relative_to(folder).as_posix()] = blob
        made = datetime.now(UTC).isoformat(timespec="seconds")
        add(ABOUT, json.dumps({**about, "made": made, "files": files}, indent=1).encode())
    with written_whole(path) as target:
        target.write(content.getvalue())
    return path
