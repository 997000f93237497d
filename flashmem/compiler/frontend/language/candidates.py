"""Candidates of a language model: an output beside its logits, from which a token is chosen (`flashmem.bundle.language`)."""

from __future__ import annotations

from dataclasses import replace

from flashmem.base.errors import UserError
from flashmem.bundle.language import CANDIDATES, IDS, KEPT, LOGITS, TEMPERATURE
from flashmem.compiler.ir.graph import Graph, GraphPort, Node, Value


def with_candidates(graph: Graph) -> Graph:
    """`graph` of a language model (as imported) with the input temperature and the output candidates; logits in float32."""
    [logits] = [port.value for port in graph.outputs if port.name == LOGITS]
    kept = min(KEPT, logits.shape[-1])
    batch = logits.shape[0]
    temperature = Value(TEMPERATURE, (batch,) if batch > 1 else (), "float32")
    made = Value(CANDIDATES, (*logits.shape[:-1], 2 * kept + 1), "int32")
    made.producer = Node("Candidates", CANDIDATES, [logits, temperature], [made], {"k": kept})
    outputs = [replace(port, dtype="float32") if port.name == LOGITS else port for port in graph.outputs]
    return replace(
        graph,
        inputs=[*graph.inputs, GraphPort(TEMPERATURE, "float32", temperature)],
        outputs=[*outputs, GraphPort(CANDIDATES, "int32", made)],
        nodes=[*graph.nodes, made.producer],
    )


def check_batch(graph: Graph) -> None:
    """Raise UserError unless the rows of a batch stay apart in `graph` of a language model (as imported)."""
    [logits] = [port.value for port in graph.outputs if port.name == LOGITS]
    [ids] = [port.value for port in graph.inputs if port.name == IDS]
    if logits.shape[:-2] != ids.shape[:1]:
        raise UserError(
            f"the model cannot answer {ids.shape[0]} requests at a time: its logits have the shape {list(logits.shape)}; leave "
            "out --batch"
        )
