"""Operators of other domains, expanded to ONNX's: ONNX Runtime's contrib operators (com.microsoft), some of ai.onnx.ml.

ONNX Runtime's optimizer writes the former to files, and skl2onnx the latter.

Each operator is a function that adds ONNX nodes in place of one node. Weights stay in their files. A packed projection is one
product whose result is sliced. Four-bit weights are the same bytes with another element type. The specification is ONNX
Runtime's list of contrib operators and ONNX Runtime itself.

The walk that infers shapes and folds constants (`compiler/frontend/folding.py`) expands a node once the shapes of its inputs
are known. A node that cannot be expanded stays, with the reason in its metadata, and the importer reports it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir

from flashmem.compiler.frontend.contrib import (
    attention,
    cached,
    classical,
    fused,
    grouped,
    normalization,
    others,
    quantized,
    recurrent,
)
from flashmem.compiler.frontend.contrib.expansion import STATE, Expand, Expansion, RefusedError, UnknownShapeError
from flashmem.compiler.ir.limits import nodes_of

DOMAIN = "com.microsoft"
CLASSICAL = "ai.onnx.ml"
OWN = "flashmem"
"""Domains of expanded operators: ONNX Runtime's, ONNX's for classical models, and the one of files that flashmem writes."""

_EXPANSIONS: dict[str, Expand] = {}
for _family in (attention, fused, grouped, normalization, others, quantized, recurrent):
    _EXPANSIONS |= _family.EXPANSIONS
_BY_DOMAIN: dict[str, dict[str, Expand]] = {
    DOMAIN: _EXPANSIONS,
    CLASSICAL: classical.EXPANSIONS,
    OWN: {
        "Blocks": quantized.ggml_blocks,
        "DequantizeBlocks": quantized.blocks_dequantised,
        **cached.OWN_EXPANSIONS,
    },
}

_REASON = "flashmem.reason"
WITHOUT_SHAPES = "of inputs without static shapes is not implemented"
"""The end of the reason why a node was not expanded whose inputs no node could give a shape."""

# Operators that ONNX Runtime registers in ONNX's own domain, and the first operator set in which ONNX has them.
_IN_ONNX = {"SimplifiedLayerNormalization": None, "LayerNormalization": 17}

_BLOCKED = "com.microsoft.nchwc"
_SAVE_AGAIN = "save the model without ONNX Runtime's optimizations, or export it again"


def operators(domain: str = DOMAIN) -> list[str]:
    """Names of the supported operators of a domain, in alphabetical order."""
    return sorted(_BY_DOMAIN[domain])


def mark(model: onnx.ModelProto) -> None:
    """Move operators that only ONNX Runtime has, in ONNX's domain, to the domain com.microsoft, in place."""
    versions = {entry.domain: entry.version for entry in model.opset_import}
    for node in nodes_of(model.graph.node, Path()):
        if node.domain == "" and node.op_type in _IN_ONNX:
            first = _IN_ONNX[node.op_type]
            if first is None or versions.get("", 0) < first:
                node.domain = DOMAIN
                if DOMAIN not in versions:
                    versions[DOMAIN] = 1
                    model.opset_import.add(domain=DOMAIN, version=1)


def mark_states(model: onnx.ModelProto, states: Collection[str]) -> None:
    """Mark, in place, attention whose cache, keys and values, is among these inputs."""
    for node in model.graph.node:
        cache = {*node.input[3:5]} if node.domain == DOMAIN and node.op_type == "GroupQueryAttention" else set()
        if cache and cache <= {*states}:
            node.metadata_props.add(key=STATE, value="1")


def expand(node: ir.Node, opset: int) -> tuple[Sequence[ir.Value], Sequence[ir.Node]] | None:
    """The replacement of `node` in operators of the ONNX operator set `opset`: its outputs, and the nodes.

    None for an operator that is not ONNX Runtime's or not supported, and as long as a required shape is unknown.
    """
    rule = _BY_DOMAIN.get(node.domain, {}).get(node.op_type)
    if rule is None or not any(value.name for value in node.outputs):
        return None
    expansion = Expansion(node, opset)
    try:
        results = rule(expansion)
    except RefusedError as error:
        node.metadata_props[_REASON] = f"{node.domain}.{node.op_type} {error} is not implemented"
        return None
    except UnknownShapeError:
        return None
    outputs: list[ir.Value] = []
    for index, output in enumerate(node.outputs):
        value = results[index] if index < len(results) else None
        if not expansion.wants(index):  # a placeholder: all other values get the names of their outputs
            value = ir.Value(name=output.name)
        elif value is None:
            node.metadata_props[_REASON] = f"{node.domain}.{node.op_type} whose output {index} is used is not implemented"
            return None
        elif value in outputs or value in node.inputs:  # the input keeps its name
            value = expansion.op("Identity", value)
        outputs.append(value)
    return outputs, expansion.nodes


def why_not(node: ir.Node) -> str | None:
    """Why `node`, of a domain that is not ONNX's, was not expanded, and what to do; None if it is not ONNX Runtime's."""
    name = f"{node.domain}.{node.op_type}"
    if node.domain == _BLOCKED:
        return f"{name} keeps its weights in blocks whose size depends on the machine that wrote them: {_SAVE_EXTENDED}"
    if node.domain == CLASSICAL:
        without = f"{name} {WITHOUT_SHAPES}" if node.op_type in classical.EXPANSIONS else None
        return node.metadata_props.get(_REASON, without)
    if node.domain != DOMAIN and not node.domain.startswith(("com.ms.", "com.microsoft.")) and node.domain != "ai.onnx.contrib":
        return None
    if (reason := node.metadata_props.get(_REASON)) is not None:
        return f"{reason}: {_SAVE_AGAIN}"
    if node.domain == DOMAIN and node.op_type in _EXPANSIONS:
        return f"{name} {WITHOUT_SHAPES}"
    return f"{name} is an operator of ONNX Runtime's own that is not supported: {_SAVE_AGAIN}"


_SAVE_EXTENDED = 'save it at ONNX Runtime\'s optimization level "extended" instead of "all"'
