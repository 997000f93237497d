"""The launches of whole models, and the models' names in the dataset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flashmem.base.errors import UnsupportedModelError, UserError
from flashmem.compiler.frontend.importer import collect_unsupported, import_model
from flashmem.compiler.frontend.shapes import OpenShapeError
from flashmem.compiler.operators import why_unsupported
from flashmem.target.descriptor import DeviceDescriptor

from .cases import FAMILIES, Target, targets_of
from .dataset import SAMPLE


def read_models(paths: Sequence[Path], descriptor: DeviceDescriptor) -> list[list[Target]]:
    """The distinct launches of each ONNX model; launches that differ only in their weights count once.

    Raises:
        UserError: a model cannot be read or run, or its name in the dataset is ambiguous.
    """
    return [_launches(path, name, descriptor) for name, path in _by_name(paths).items()]


def _by_name(paths: Sequence[Path]) -> dict[str, Path]:
    """The models by their names in the dataset."""
    found: dict[str, Path] = {}
    for path in paths:
        name = _name(path)
        family, _, index = name.rpartition("-")
        if name == SAMPLE or (family in FAMILIES and index.isdecimal()):
            raise UserError(f"--model {path}: {name!r} is the dataset's name for sampled kernels; rename the model")
        if name in found:
            raise UserError(
                f"--model {found[name]} and --model {path} would both be called {name!r} in the dataset; rename one "
                f"(a model.onnx is called after its folder)"
            )
        found[name] = path
    return found


def _name(path: Path) -> str:
    """The name of a model: the file's, or its folder's if the file is named model.onnx, as `flashmem zoo export` does."""
    return (path.parent.resolve().name if path.stem == "model" else "") or path.stem


def _launches(path: Path, name: str, descriptor: DeviceDescriptor) -> list[Target]:
    try:
        graph = import_model(path, {}, why_unsupported)
        collect_unsupported(graph, why_unsupported)
    except OpenShapeError as error:
        raise UserError(f"{path} leaves sizes of its inputs open; export it with all of them fixed to profile it") from error
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}", error.nodes) from error
    found: dict[object, Target] = {}
    for target in targets_of(graph, descriptor, "fp32", name, name):
        launch = target.launch
        weights = sum(s.nbytes for s in target.program.slices for arg in launch.args if arg.value == s.name)
        key = (launch.kernel, launch.global_size, launch.local_size, launch.macs, launch.bytes, weights, launch.shape)
        found.setdefault(key, target)
    return list(found.values())
