"""From an ONNX file to a graph that is ready for fusion: the first two stages."""

from __future__ import annotations

from pathlib import Path

from flashmem.base.errors import UserError
from flashmem.compiler.frontend.import_graph import Extend, as_imported
from flashmem.compiler.frontend.language.model import Rewrite, unchanged
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.options import Options
from flashmem.compiler.passes.quantised_caches import quantised_states
from flashmem.compiler.stages.stages import IMPORT, REWRITE


def read_graph(model: Path, options: Options, rewrite: Rewrite = unchanged, extend: Extend = as_imported) -> Graph:
    """The graph of `model`, after the passes of the compiler, ready for fusion. Reads no weights.

    Raises:
        UserError: the model cannot be read, or has something that cannot run.
    """
    graph = REWRITE(IMPORT(model, options, rewrite, extend))
    if options.request.resolved_state_precision == "int8" and not quantised_states(graph):
        raise UserError(
            f"no state of {model} is a cache of keys or values that attention alone reads, and others cannot be stored in "
            "int8; use --state-precision fp16"
        )
    return graph
