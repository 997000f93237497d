"""From a model, a device and a precision to what their points share: the program, and for measuring a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

from flashmem.bundle import Bundle
from flashmem.commands.compiling import CompileOptions, compile_apart
from flashmem.commands.simulate import described_device, mode_for_bundle
from flashmem.compile import Options, choose_mode, find_descriptor, generate_program
from flashmem.errors import UserError
from flashmem.planning.planner import Limits
from flashmem.sweeping.grid import Point
from flashmem.sweeping.points import Subject
from flashmem.units import parse_shape


def subject_of(point: Point) -> Subject:
    """The subject of `point`. A bundle is taken as it is; an ONNX file is compiled if points are measured, else only read.

    Raises:
        UserError: the model, the device, the mode or the precision has to be changed.
    """
    path = Path(point.model)
    if path.is_dir():
        return _of_bundle(path, point)
    if point.source == "measured":
        options = CompileOptions(
            device=point.device,
            precision=point.precision,
            shape=tuple(point.shape.split()),
            mode=None if point.mode == "auto" else point.mode,
        )
        bundle = Bundle.open(compile_apart(path, options))
        return Subject(bundle.program, bundle.descriptor, mode_for_bundle(bundle, bundle.descriptor, point.mode), bundle.path)
    descriptor = find_descriptor(point.device)
    mode = choose_mode(descriptor, point.mode)
    precision = cast(Literal["fp32", "fp16"], point.precision)
    shapes = dict(parse_shape(text) for text in point.shape.split())
    generated = generate_program(path, Options(descriptor, mode, Limits(), precision, shapes))
    return Subject(generated.program, descriptor, mode)


def _of_bundle(path: Path, point: Point) -> Subject:
    bundle = Bundle.open(path)
    if point.precision != bundle.program.precision:
        raise UserError(
            f"{path} was compiled with --precision {bundle.program.precision}; leave {point.precision} out, or name the model"
        )
    if point.shape:
        raise UserError(f"--shape was settled when {path} was compiled; name the model, or leave --shape out")
    descriptor = described_device(bundle, point.device)
    return Subject(bundle.program, descriptor, mode_for_bundle(bundle, descriptor, point.mode), bundle.path)
