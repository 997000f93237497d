"""Binding of the model's open dimensions to sizes.

A dimension is open when the file gives it a name, or nothing, or (in PaddlePaddle's files) the number -1. No size is guessed,
not even the batch: the caller must give a size for every open dimension. A name means the same size wherever it appears.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx

from flashmem.base.errors import UserError
from flashmem.compiler.ir.limits import nodes_of, subgraphs


class OpenShapeError(UserError):
    """An input has dimensions for which the caller gave no size."""


def bind_shapes(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Give every input of `model` a static shape, in place; other shapes are removed, to be inferred again.

    Raises UserError for an input that does not exist and a rank or a size that contradicts the file, OpenShapeError for
    dimensions left open.
    """
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    # Before IR version 4 files listed weights as inputs too. They are constants here.
    inputs = [value for value in graph.input if value.name not in weights]
    del graph.input[:]
    graph.input.extend(inputs)
    for value in graph.input:  # the caller gives every input, an optional one too
        if value.type.HasField("optional_type") and value.type.optional_type.elem_type.HasField("tensor_type"):
            value.type.CopyFrom(onnx.TypeProto.FromString(value.type.optional_type.elem_type.SerializeToString()))
    by_name = {value.name: value for value in graph.input}
    for name in shapes:
        if name not in by_name:
            raise UserError(f"{path} has no input {name!r} to give a shape to: its inputs are {', '.join(by_name) or 'none'}")
    symbols: dict[str, tuple[int, str]] = {}
    for name, shape in shapes.items():
        _bind(by_name[name], shape, symbols, path)
    _bind_symbols(graph, symbols, path)
    _forget(graph, path)
    for output in graph.output:
        if output.name in by_name:
            output.type.CopyFrom(by_name[output.name].type)
    for function in model.functions:
        del function.value_info[:]
        for node in nodes_of(function.node, path):
            for inner in subgraphs(node):
                _forget(inner, path)


def _forget(graph: onnx.GraphProto, path: Path) -> None:
    """Remove declared shapes of computed values in `graph` and its subgraphs: they may come from an older version."""
    for inner in (graph, *(inner for node in nodes_of(graph.node, path) for inner in subgraphs(node))):
        del inner.value_info[:]
        for value in (
            *inner.output,
            *(() if inner is graph else inner.input),
        ):  # the shapes of a loop's inputs may change with each iteration
            if value.type.HasField("tensor_type"):
                value.type.tensor_type.ClearField("shape")


def _bind(value: onnx.ValueInfoProto, shape: tuple[int, ...], symbols: dict[str, tuple[int, str]], path: Path) -> None:
    name = value.name
    tensor = value.type.tensor_type
    given = "x".join(map(str, shape))
    wanted = _written(value)
    if any(size < 0 for size in shape):
        raise UserError(f"the shape {given} given for input {name!r} has a negative size")
    if not tensor.HasField("shape"):
        for size in shape:
            tensor.shape.dim.add(dim_value=size)
        return
    if len(shape) != len(tensor.shape.dim):
        raise UserError(f"the shape {given} given for input {name!r} has rank {len(shape)}, but {path} wants {wanted}")
    for dim, size in zip(tensor.shape.dim, shape, strict=True):
        if _is_name(dim.dim_param):
            bound, by = symbols.setdefault(dim.dim_param, (size, name))
            if bound != size:
                raise UserError(f"dimension {dim.dim_param!r} cannot be {bound} in input {by!r} and {size} in input {name!r}")
        elif dim.HasField("dim_value") and dim.dim_value >= 0 and dim.dim_value != size:
            raise UserError(f"the shape {given} given for input {name!r} contradicts {path}, which wants {wanted}")
        dim.Clear()
        dim.dim_value = size


def _bind_symbols(graph: onnx.GraphProto, symbols: Mapping[str, tuple[int, str]], path: Path) -> None:
    """Apply the sizes bound in one input to the others, then check that no dimension is open."""
    missing: list[str] = []
    for value in graph.input:
        if not value.type.HasField("tensor_type"):
            continue  # a sequence or a map: refused later, for its type
        tensor = value.type.tensor_type
        if not tensor.HasField("shape"):
            missing.append(f"input {value.name!r} has no declared shape (--shape {value.name}=1x...)")
            continue
        template = _written(value)
        unbound: list[str] = []
        for index, dim in enumerate(tensor.shape.dim):
            if dim.dim_param in symbols:
                size = symbols[dim.dim_param][0]
                dim.Clear()
                dim.dim_value = size
            elif not dim.HasField("dim_value") or dim.dim_value < 0:
                unbound.append(f"{index} ({dim.dim_param})" if dim.dim_param else str(index))
        if unbound:
            word = "dimension" if len(unbound) == 1 else "dimensions"
            missing.append(f"input {value.name!r} leaves {word} {', '.join(unbound)} open (--shape {value.name}={template})")
    if missing:
        raise OpenShapeError(f"{path}: {'; '.join(missing)}: give each a size")


def _written(value: onnx.ValueInfoProto) -> str:
    """The declared shape in the form that a user types, open dimensions in brackets to replace: <batch>x3x224x224."""
    return "x".join(map(_size_or_name, value.type.tensor_type.shape.dim))


def _size_or_name(dim: onnx.TensorShapeProto.Dimension) -> str:
    closed = dim.HasField("dim_value") and dim.dim_value >= 0
    return str(dim.dim_value) if closed else f"<{dim.dim_param or '?'}>"


def _is_name(symbol: str) -> bool:
    """Whether `symbol` names one dimension. Some exporters write `?` or `None` for every dynamic dimension instead."""
    return any(letter.isalpha() for letter in symbol) and symbol.lower() not in ("none", "unknown")
