"""The pass pipeline: the passes between import and fusion, in order.

Each pass maps a graph to a graph. `requires` and `ensures` name forms of a graph (`compiler.passes.verifier`). Once a pass has
ensured a form, every later pass keeps it. The verifier runs after every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.passes.attention import match_attention
from flashmem.compiler.passes.attention_views import fold_attention_views
from flashmem.compiler.passes.decompose import decompose
from flashmem.compiler.passes.layout import assign_layouts
from flashmem.compiler.passes.normalization import match_normalizations
from flashmem.compiler.passes.qdq_fusion import fuse_qdq
from flashmem.compiler.passes.quantised_caches import quantise_caches
from flashmem.compiler.passes.rotary import match_rotary
from flashmem.compiler.passes.row_parts import fold_row_parts
from flashmem.compiler.passes.rows_as_images import rows_as_images
from flashmem.compiler.passes.split_matmul import split_matmuls
from flashmem.compiler.passes.transpose_hoisting import hoist_transposes
from flashmem.compiler.passes.transpose_sinking import sink_transposes
from flashmem.compiler.passes.update_views import fold_update_views
from flashmem.compiler.passes.verifier import Form, InvalidResultError, verify


@dataclass(frozen=True)
class Pass:
    """A pass: what it does, its function from graph to graph, the forms it requires, and the forms it ensures."""

    name: str
    what: str
    run: Callable[[Graph], Graph]
    requires: tuple[Form, ...] = ()
    ensures: tuple[Form, ...] = ()


Observe = Callable[[Pass, Graph], None]
"""Called with each pass and its resulting graph, before the verifier runs."""

PASSES = (
    Pass("decompose", "many forms of ONNX become few", decompose, ensures=("decomposed",)),
    Pass(
        "match-normalizations",
        "x / sqrt(mean(x²) + ε), and the same of x minus its mean, become one operator",
        match_normalizations,
        requires=("decomposed",),
    ),
    Pass(
        "match-rotary",
        "rotary positions, in halves or in neighbouring pairs, become one operator",
        match_rotary,
        requires=("decomposed",),
    ),
    Pass("fuse-qdq", "products read the 8-bit integers before a DequantizeLinear", fuse_qdq, requires=("decomposed",)),
    Pass(
        "rows-as-images",
        "a Slice or Concat between two convolutions of one dimension gets the four dimensions that they have",
        rows_as_images,
        requires=("decomposed",),
    ),
    Pass(
        "assign-layouts",
        "images around convolutions are stored with their channels last",
        assign_layouts,
        requires=("decomposed",),
        ensures=("channels last",),
    ),
    Pass(
        "match-attention",
        "softmax(f(QKᵀ))V becomes one operator; no other pass looks for it",
        match_attention,
        requires=("decomposed",),
        ensures=("attention matched",),
    ),
    Pass(
        "hoist-transposes",
        "a Transpose of the result of a product with weights moves to its operand, if another one or attention precedes it",
        hoist_transposes,
        requires=("decomposed", "attention matched"),
    ),
    Pass(
        "sink-transposes",
        "Transposes wait until an operator needs the order; most cancel",
        sink_transposes,
        requires=("decomposed", "channels last", "attention matched"),
    ),
    Pass(
        "split-matmuls",
        "a product of which nodes read only parts becomes a product for each part",
        split_matmuls,
        requires=("decomposed", "attention matched"),
    ),
    Pass(
        "fold-attention-views",
        "attention reads its operands and writes its answer through strided views",
        fold_attention_views,
        requires=("attention matched",),
        ensures=("attention folded",),
    ),
    Pass(
        "quantise-caches",
        "with states in int8: caches that attention alone reads become rows of int8 with a scale",
        quantise_caches,
        requires=("decomposed", "attention folded"),
    ),
    Pass(
        "fold-update-views",
        "scatters read their updates through strided views: new rows of a cache are no tensor of their own",
        fold_update_views,
        requires=("decomposed", "attention folded"),
    ),
    Pass(
        "fold-row-parts",
        "elementwise operators read columns of a product where they are",
        fold_row_parts,
        requires=("decomposed",),
    ),
)
"""All passes, in order. Fusion (`compiler.passes.fusion`) follows: it groups nodes and does not change the graph."""


def prepare(graph: Graph, observe: Observe = lambda step, graph: None) -> Graph:
    """`graph`, as imported, after all passes.

    Raises:
        InvalidResultError: a pass broke a rule of the verifier.
    """
    return run_passes(graph, PASSES, observe)


def run_passes(
    graph: Graph, passes: Sequence[Pass], observe: Callable[[Pass, Graph], None] = lambda step, graph: None
) -> Graph:
    """`graph` after `passes`, verified after each; `observe` as for `prepare`.

    Raises:
        InvalidResultError: a pass broke a rule, or requires a form that no pass before it ensures.
    """
    forms: dict[Form, None] = {}
    for step in passes:
        if missing := [form for form in step.requires if form not in forms]:
            raise InvalidResultError(f"pass {step.name} requires a graph that is {missing[0]}, which no pass before it ensures")
        graph = step.run(graph)
        observe(step, graph)
        forms |= dict.fromkeys(step.ensures)
        try:
            verify(graph, forms)
        except InvalidResultError as error:
            raise InvalidResultError(f"after pass {step.name}: {error}") from error
    return graph
