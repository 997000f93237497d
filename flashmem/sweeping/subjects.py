"""From a model, a device and a precision to what their points share: a graph or a bundle's program, and weights to measure."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

from flashmem.bundle import Bundle
from flashmem.codegen.emitter import RESIDENT_CONSTANT_BYTES
from flashmem.compile import Options, choose_mode, find_descriptor, read_graph
from flashmem.compile import compile as compile_model
from flashmem.device import TransferMode
from flashmem.errors import UserError
from flashmem.graph.layout import assign_layouts
from flashmem.graph.normalize import normalize
from flashmem.graph.portable import portable
from flashmem.planning.planner import Limits
from flashmem.simulation.target import described_device, mode_for
from flashmem.sweeping.grid import ZOO, Point
from flashmem.sweeping.points import Subject
from flashmem.units import parse_shape
from flashmem.zoo_graphs import zoo_graph


def subject_of(point: Point) -> Subject:
    """The subject of `point`. A bundle is taken as it is; an ONNX file is compiled if points are measured, else only read.

    Raises:
        UserError: the model, the device, the mode or the precision has to be changed.
    """
    if point.model.startswith(ZOO):
        return _of_architecture(point)
    path = Path(point.model)
    if path.is_dir():
        return _of_bundle(path, point)
    shapes = dict(parse_shape(text) for text in point.shape.split())
    bundle: Bundle | None = None
    if point.source == "measured":
        bundle = compile_model(  # into the user's cache, or found there
            path,
            device=point.device,
            precision=_precision(point),
            shapes=shapes,
            mode=cast(TransferMode | Literal["auto"], point.mode),
            unfusion=False,
        )
    descriptor = find_descriptor(point.device) if bundle is None else bundle.descriptor
    mode = choose_mode(descriptor, point.mode)
    graph = read_graph(path, Options(descriptor, mode, Limits(), _precision(point), shapes))
    if bundle is None:
        return Subject(descriptor, mode, portable(graph, RESIDENT_CONSTANT_BYTES))
    return Subject(descriptor, mode, graph, bundle.program, bundle.path)


def _precision(point: Point) -> Literal["fp32", "fp16"]:
    return cast(Literal["fp32", "fp16"], point.precision)


def _of_architecture(point: Point) -> Subject:
    if point.source == "measured":
        raise UserError(
            f"{point.model} has no weights to run with; export it with `flashmem zoo export`, or leave --measured out"
        )
    if point.shape:
        raise UserError(f"--shape does not go with {point.model}, whose shapes are fixed; leave it out")
    descriptor = find_descriptor(point.device)
    mode = choose_mode(descriptor, point.mode)
    graph = assign_layouts(normalize(zoo_graph(point.model.removeprefix(ZOO))))
    return Subject(descriptor, mode, portable(graph, RESIDENT_CONSTANT_BYTES))


def _of_bundle(path: Path, point: Point) -> Subject:
    bundle = Bundle.open(path)
    if point.precision != bundle.program.precision:
        raise UserError(
            f"{path} was compiled with --precision {bundle.program.precision}; leave {point.precision} out, or name the model"
        )
    if point.shape:
        raise UserError(f"--shape was settled when {path} was compiled; name the model, or leave --shape out")
    descriptor = described_device(bundle, point.device)
    mode = mode_for(bundle.program, descriptor, point.mode, planned=bundle.meta.get("mode"))
    return Subject(descriptor, mode, None, bundle.program, bundle.path)
