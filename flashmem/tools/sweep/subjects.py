"""The subject of a sweep's points: the graph or the bundle for a model, a device and a precision."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from flashmem.base.errors import NoDeviceError, UserError
from flashmem.base.types import Precision, TransferMode
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.shape_variants import read_variants
from flashmem.compile import compile as compile_model
from flashmem.compiler.ir.portable import portable
from flashmem.compiler.memory.constants import RESIDENT_CONSTANT_BYTES
from flashmem.compiler.options import Options
from flashmem.compiler.passes.pipeline import prepare
from flashmem.compiler.stages.reading import read_graph
from flashmem.options import check_precision
from flashmem.request.request import BundleRequest
from flashmem.runtime.request.options import choose_mode, device_here, find_descriptor
from flashmem.target.descriptor import DeviceDescriptor, descriptor_names
from flashmem.tools.sweep.grid import Point
from flashmem.tools.sweep.points import Subject
from flashmem.tools.zoo.graphs import check_architecture, zoo_graph
from flashmem.tools.zoo.names import architecture


@dataclass(frozen=True)
class SweepTarget:
    """The device of a subject, and its bundle if it is one."""

    descriptor: DeviceDescriptor
    mode: TransferMode
    bundle: Bundle | None = None


def target_of(point: Point) -> SweepTarget:
    """Resolve the device and mode of `point` before its model is read, so that a sweep can refuse it early.

    Raises:
        UserError: the model's name, the device, the mode or the precision is wrong.
    """
    if point.source == "measured":
        _require_here(point.device)
    if Path(point.model).is_dir():
        return _of_bundle(Path(point.model), point)
    name = architecture(point.model)
    if name is not None:
        _check_architecture(name, point)
    descriptor = find_descriptor(point.device)
    check_precision(descriptor, cast(Precision, point.precision))
    return SweepTarget(descriptor, choose_mode(descriptor, point.mode))


def subject_of(point: Point) -> Subject:
    """The subject of `point`. An ONNX file is compiled if points are measured, else only read. A bundle is used unchanged.

    Raises:
        UserError: the model, the device, the mode or the precision is wrong.
    """
    target = target_of(point)
    descriptor = target.descriptor
    mode = target.mode
    if target.bundle is not None:
        return Subject(descriptor, mode, None, target.bundle.program, target.bundle.path)
    name = architecture(point.model)
    if name is not None:
        graph = prepare(zoo_graph(name))
        return Subject(descriptor, mode, portable(graph, RESIDENT_CONSTANT_BYTES))
    path = Path(point.model)
    precision = cast(Precision, point.precision)
    [shapes, *others] = read_variants(point.shape.split())
    if others:
        raise UserError("--shape names several shape variants, and a sweep is of one; name each input once")
    graph = read_graph(path, Options(descriptor, mode, BundleRequest(precision=precision), shapes=shapes))
    if point.source == "simulated":
        return Subject(descriptor, mode, portable(graph, RESIDENT_CONSTANT_BYTES))
    bundle = compile_model(  # into the user's cache, unless it is there
        path, device=point.device, precision=precision, shapes=shapes, mode=mode, unfusion=False
    )
    return Subject(descriptor, mode, graph, bundle.program, bundle.path)


def _require_here(device: str) -> None:
    """Raise UserError if `device` is not on this machine. A descriptor in a file may describe any device, as in `flashmem
    run`.
    """
    try:
        device_here(device)
    except NoDeviceError as error:
        if device not in descriptor_names():
            raise
        raise UserError(
            f"no {device} is here, and measuring needs a device that is; leave --measured out to simulate it"
        ) from error


def _check_architecture(name: str, point: Point) -> None:
    check_architecture(name)
    if point.source == "measured":
        raise UserError(
            f"{point.model} has no weights to run with; export it with `flashmem zoo export`, or leave --measured out"
        )
    if point.shape:
        raise UserError(f"--shape does not go with {point.model}, whose shapes are fixed; leave it out")


def _of_bundle(path: Path, point: Point) -> SweepTarget:
    bundle = Bundle.open(path)
    if point.precision != bundle.program.precision:
        raise UserError(
            f"{path} was compiled with --precision {bundle.program.precision}; leave {point.precision} out, or name the model"
        )
    if point.shape:
        raise UserError(f"--shape was fixed when {path} was compiled; name the model, or leave --shape out")
    descriptor = find_descriptor(point.device, own=bundle.descriptor)
    mode = choose_mode(descriptor, point.mode, path=bundle.program.memory_path, planned=bundle.meta.get("mode"))
    return SweepTarget(descriptor, mode, bundle)
