"""Quantisation of an ONNX model's float32 weights to integers with scales, before the model is compiled.

The result is another ONNX file, in which `flashmem.DequantizeBlocks` computes each quantised weight from its codes.

- Matrices of MatMul and Gemm have signed codes of 4 or 8 bits in blocks of 32 along the depth of the product, each with a scale
  in float16: 4.5 or 8.5 bits a weight. Blocks are of 24 or 16 where that divides the depth and 32 does not. Other depths have
  8 bits and one scale for each column.
- Filters of Conv have 8 bits and one scale for each output channel.
- Tables of Gather, and matrices of a product that is an output of the model, have 8 bits: their errors are errors of answers.

A code is the nearest to weight / scale. The scale of 8 bits is the largest weight / 127. For 4 bits the largest weight has a
code between 7 and 8.5, and of several such scales the one with the least squared error is used.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, get_args

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from flashmem.base.errors import UserError
from flashmem.base.types import Quantize
from flashmem.bundle.working_folder import working_folder
from flashmem.compiler.frontend.contrib import OWN
from flashmem.compiler.frontend.contrib.packed import packed_codes
from flashmem.compiler.frontend.external_data import place_data, resolve_external_data
from flashmem.compiler.frontend.mapped_file import load_mapped

Floats = NDArray[np.float32]

BLOCKS = (32, 24, 16)
"""Weights along the depth of a product that share a scale; the first that divides it is used."""

SMALLEST = 4096
"""A weight with fewer elements stays in float32."""

_CHUNK = 1 << 22  # elements that are quantised at a time
_TOPS = np.linspace(7.0, 8.5, 7, dtype=np.float32)  # codes of a block's largest weight that are tried
_AFTER_HEAD = {"Add", "Cast", "Identity", "LogSoftmax", "Reshape", "Softmax", "Squeeze", "Transpose", "Unsqueeze"}


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight after quantisation. `error`: the root of its mean squared error over that of its mean square."""

    name: str
    bits: int
    block: int
    elements: int
    error: float


@dataclass(frozen=True)
class QuantisedModel:
    """The quantised model, an ONNX file, and its quantised weights."""

    path: Path
    weights: tuple[QuantisedWeight, ...]


@dataclass(frozen=True)
class Codes:
    """A matrix [rows, depth] as int8 codes, with float32 scales [rows, depth / block]."""

    codes: NDArray[np.int8]
    scales: Floats

    @property
    def floats(self) -> Floats:
        """What the codes stand for."""
        rows, depth = self.codes.shape
        blocks = self.codes.reshape(rows, self.scales.shape[1], -1)
        elements: Floats = (blocks * self.scales[:, :, None]).reshape(rows, depth)
        return elements


@contextmanager
def quantised(path: Path, wanted: Quantize, *, as_floats: bool = False, beside: Path | None = None) -> Iterator[QuantisedModel]:
    """The model at `path` with quantised weights, as long as the body runs.

    `as_floats`: write the floats that the codes stand for, for other runtimes. The model is in a folder beside the bundle
    `beside`, or a temporary one.

    Raises:
        UserError: it has no weights to quantise, or is no ONNX model.
    """
    if wanted not in get_args(Quantize):
        raise UserError(f"quantize {wanted!r} is unknown; name one of: {', '.join(get_args(Quantize))}")
    proto = load_mapped(path)
    resolve_external_data(proto, path)
    found = _Uses(proto.graph).weights()
    if not found:
        raise UserError(f"{path} has no float32 weights of {SMALLEST} elements or more that can be quantised")
    with working_folder(beside, "flashmem-quantised-") as folder:
        target = folder / f"{path.stem}.onnx"
        with (target.parent / "weights").open("wb") as data:
            weights = _Writer(proto, data, 4 if wanted == "int4" else 8, as_floats).write(found)
        onnx.save(proto, target)
        yield QuantisedModel(target, tuple(weights))


@dataclass(frozen=True)
class _Weight:
    """What a weight is for. `depth`: the axis of a matrix along which products sum; `exact`: it needs 8 bits."""

    depth: int
    exact: bool
    is_filter: bool = False


class _Uses:
    """How the nodes of a graph use its weights."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.readers: defaultdict[str, list[tuple[onnx.NodeProto, int]]] = defaultdict(list)
        self.outputs = {output.name for output in graph.output}
        self.inside = set[str]()  # names that subgraphs read
        for node in graph.node:
            for index, name in enumerate(node.input):
                self.readers[name].append((node, index))
            self.inside |= _inside(node)

    def weights(self) -> dict[str, _Weight]:
        """The weights that can be quantised, by name."""
        given = {value.name for value in self.graph.input}
        found = {}
        for tensor in self.graph.initializer:
            large = tensor.data_location == onnx.TensorProto.EXTERNAL and math.prod(tensor.dims) >= SMALLEST
            if not large or tensor.data_type != onnx.TensorProto.FLOAT or tensor.name in given:
                continue
            uses = self.uses(tensor.name, len(tensor.dims))
            known = [use for use in uses if use is not None]
            if len(known) == len(uses) and len({(use.is_filter, use.depth) for use in known}) == 1:
                found[tensor.name] = replace(known[0], exact=any(use.exact for use in known))
        return found

    def uses(self, name: str, rank: int, *, turned: bool = False) -> list[_Weight | None]:
        """Each use of a value that is a weight, `turned` by a Transpose or not; None for a use that needs floats."""
        found: list[_Weight | None] = [None] if name in self.outputs or name in self.inside else []
        for node, index in self.readers[name]:
            if node.op_type == "Identity":
                found += self.uses(node.output[0], rank, turned=turned)
            elif node.op_type == "Transpose" and rank == 2:
                found += self.uses(node.output[0], rank, turned=turned != (_field(node, "perm", [1, 0]) == [1, 0]))
            else:
                found.append(self.use(node, index, rank, turned))
        return found

    def use(self, node: onnx.NodeProto, index: int, rank: int, turned: bool) -> _Weight | None:
        """The use of a weight as input `index` of a node."""
        if node.domain not in ("", "ai.onnx"):
            return None
        if node.op_type == "Conv" and index == 1 and rank >= 3:
            return _Weight(1, exact=True, is_filter=True)
        if rank != 2:
            return None
        if node.op_type == "Gather" and index == 0 and not turned and _field(node, "axis", 0) == 0:
            return _Weight(1, exact=True)
        if index == 1 and (node.op_type == "MatMul" or (node.op_type == "Gemm" and not _field(node, "transA", 0))):
            across = node.op_type == "Gemm" and bool(_field(node, "transB", 0))
            return _Weight(int(across != turned), exact=self.is_head(node.output[0]))
        return None

    def is_head(self, name: str) -> bool:
        """Whether a value is an output of the model, apart from a bias, a softmax or another shape."""
        while name not in self.outputs:
            readers = self.readers[name]
            if len(readers) != 1 or readers[0][0].op_type not in _AFTER_HEAD:
                return False
            name = readers[0][0].output[0]
        return True


class _Writer:
    """Rewrites a model, and writes its large tensors to `data`."""

    def __init__(self, proto: onnx.ModelProto, data: BinaryIO, bits: int, as_floats: bool) -> None:
        self.proto = proto
        self.data = data
        self.bits = bits
        self.as_floats = as_floats

    def write(self, found: Mapping[str, _Weight]) -> list[QuantisedWeight]:
        """Quantise the weights in `found`, and copy the others."""
        graph = self.proto.graph
        kept = list[onnx.TensorProto]()
        nodes = list[onnx.NodeProto]()
        written: list[QuantisedWeight] = []
        for tensor in graph.initializer:
            if tensor.name in found:
                made, parts, about = self.quantise(tensor.name, _mapped(tensor), found[tensor.name])
                nodes += made
                kept += parts
                written.append(about)
            else:
                kept.append(self.copied(tensor))
        rest = [*nodes, *graph.node]
        del graph.initializer[:], graph.node[:]
        graph.initializer.extend(kept)
        graph.node.extend(rest)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    attribute.t.CopyFrom(self.copied(attribute.t))
        if all(each.domain != OWN for each in self.proto.opset_import):
            self.proto.opset_import.append(helper.make_opsetid(OWN, 1))
        return written

    def quantise(
        self, name: str, array: Floats, weight: _Weight
    ) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto], QuantisedWeight]:
        """The nodes and tensors that replace a weight."""
        rows = array.reshape(len(array), -1) if weight.depth else array.T
        depth = rows.shape[1]
        block = depth if weight.is_filter else next((size for size in BLOCKS if depth % size == 0), depth)
        bits = self.bits if block in BLOCKS and not weight.exact else 8
        made = list[Codes]()
        wrong = 0.0
        whole = 0.0
        for part in _chunks(rows):
            if not np.isfinite(part).all():
                raise UserError(
                    f"the weight {name} has infinities or NaN, which integers cannot stand for; leave out --quantize"
                )
            made.append(quantise(part, block, bits))
            wrong += float(np.square(made[-1].floats - part, dtype=np.float64).sum())
            whole += float(np.square(part, dtype=np.float64).sum())
        about = QuantisedWeight(name, bits, block, array.size, math.sqrt(wrong / whole) if whole else 0.0)
        codes = np.concatenate([part.codes for part in made])
        scales = np.concatenate([part.scales for part in made])
        if self.as_floats:
            floats = Codes(codes, scales).floats
            return [], [self.stored(name, (floats if weight.depth else floats.T).reshape(array.shape))], about
        fields: dict[str, Any] = {"bits": bits, "block_size": block}
        if weight.is_filter:
            fields["shape"] = array.shape
        tensors = [
            self.stored(f"{name}.codes", packed_codes(codes.view(np.uint8), bits)),
            self.stored(f"{name}.scales", scales),
        ]
        first = name if weight.depth else f"{name}.transposed"
        names = [tensor.name for tensor in tensors]
        nodes = [helper.make_node("DequantizeBlocks", names, [first], name=first, domain=OWN, **fields)]
        if not weight.depth:
            nodes.append(helper.make_node("Transpose", [first], [name], name=name, perm=[1, 0]))
        return nodes, tensors, about

    def copied(self, tensor: onnx.TensorProto) -> onnx.TensorProto:
        """A tensor whose data, if it is in a file, is copied to this one."""
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            return tensor
        made = onnx.TensorProto()
        made.CopyFrom(tensor)
        entries = {entry.key: entry.value for entry in tensor.external_data}
        with Path(entries["location"]).open("rb") as file:
            file.seek(int(entries["offset"]))
            place_data(made, file.read(int(entries["length"])), self.data)
        return made

    def stored(self, name: str, array: NDArray[np.generic]) -> onnx.TensorProto:
        """An array as a tensor."""
        tensor = numpy_helper.from_array(np.ascontiguousarray(array), name)
        place_data(tensor, tensor.raw_data, self.data)
        return tensor


def quantise(rows: Floats, block: int, bits: int) -> Codes:
    """Quantise a matrix [rows, depth] in blocks of `block` along its rows, to signed codes."""
    blocks = rows.reshape(len(rows), -1, block)
    ends = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)[..., 0]  # the largest, with their signs
    if bits == 8:
        scales = _half(np.abs(ends) / 127)
        return Codes(_coded(blocks, scales, bits).reshape(rows.shape), scales)
    best = np.zeros_like(ends)
    least = np.full(ends.shape, np.inf, np.float32)
    sizes = np.where(ends == 0, 1, np.abs(ends))
    relative = blocks / sizes[..., None]
    for top in _TOPS:  # -8 is a code and 8 is none, so the largest weight gets a negative one
        scales = _half(-ends / top)
        wrong = np.square(_coded(blocks, scales, bits) * (scales / sizes)[..., None] - relative).sum(-1)
        better = wrong < least
        best = np.where(better, scales, best)
        least = np.where(better, wrong, least)
    return Codes(_coded(blocks, best, bits).reshape(rows.shape), best)


def _coded(blocks: Floats, scales: Floats, bits: int) -> NDArray[np.int8]:
    over = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    top = 1 << bits - 1
    return np.clip(np.rint(blocks * over[..., None]), -top, top - 1).astype(np.int8)


def _half(scales: NDArray[np.floating]) -> Floats:
    """Scales as float16 has them, unless they are too large or too small for it. Small ones among larger ones do not matter."""
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16).astype(np.float32)
    sizes = np.abs(scales)
    near = (np.abs(halves - scales) <= 0.02 * sizes) | np.isfinite(halves) & (sizes < 1e-4 * sizes.max(initial=0))
    return np.where(near, halves, scales)


def _chunks(rows: Floats) -> Iterator[Floats]:
    count = max(1, _CHUNK // rows.shape[1])
    return (np.ascontiguousarray(rows[first : first + count]) for first in range(0, len(rows), count))


def _mapped(tensor: onnx.TensorProto) -> Floats:
    """The data of a float32 tensor in a file."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return np.memmap(entries["location"], "<f4", "r", int(entries["offset"]), tuple(tensor.dims))


def _inside(node: onnx.NodeProto) -> set[str]:
    """The names that the subgraphs of a node read or return."""
    found = set[str]()
    for attribute in node.attribute:
        for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
            found |= {output.name for output in graph.output}
            for inner in graph.node:
                found |= {*inner.input} | _inside(inner)
    return found


def _field(node: onnx.NodeProto, name: str, default: int | Sequence[int]) -> int | list[int]:
    """An attribute of a node, a number or numbers."""
    for attribute in node.attribute:
        if attribute.name == name:
            value = helper.get_attribute_value(attribute)
            return int(value) if isinstance(value, int) else [int(each) for each in value]
    return default if isinstance(default, int) else [*default]
