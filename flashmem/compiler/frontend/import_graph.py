"""From an ONNX file to a graph, as imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from flashmem.compiler.frontend.importer import collect_unsupported, import_model
from flashmem.compiler.frontend.language.model import Rewrite, unchanged
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.operators import why_unsupported
from flashmem.compiler.options import Options

Extend = Callable[[Graph], Graph]
"""Adds to a graph after its import."""


def as_imported(graph: Graph) -> Graph:
    """`graph` itself."""
    return graph


def import_graph(model: Path, options: Options, rewrite: Rewrite = unchanged, extend: Extend = as_imported) -> Graph:
    """The graph of `model`, changed by `rewrite`, as imported and then extended, before the passes of the compiler.

    Reads no weights.

    Raises:
        UserError: the model cannot be read, or has something that cannot run.
    """
    graph = import_model(model, options.shapes, why_unsupported, options.request.states, options.request.constants, rewrite)
    collect_unsupported(graph, why_unsupported)
    return replace(extend(graph), state_precision=options.request.resolved_state_precision)
