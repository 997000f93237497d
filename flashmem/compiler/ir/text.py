"""Text form of a graph, one line for each node, to read and to compare with `diff`."""

from __future__ import annotations

from collections.abc import Iterator

from flashmem.compiler.ir.graph import Graph, Node, Value


def graph_text(graph: Graph) -> str:
    """`graph` as lines: inputs, nodes in order with types and shapes, outputs. Elements of constants are omitted."""
    return "".join(f"{line}\n" for line in _lines(graph))


def node_text(node: Node) -> str:
    """One node as a line: `y: float32[2,3] = Op(x: float32[2,3], w: const float32[3], axes=(1,)) # name`."""
    results = ", ".join(value_text(value) for value in node.outputs)
    given = [f"{name}={attribute!r}" for name, attribute in sorted(node.attributes.items())]
    arguments = ", ".join([*("-" if value is None else value_text(value) for value in node.inputs), *given])
    return f"{results} = {node.op}({arguments}) # {node.name}"


def _lines(graph: Graph) -> Iterator[str]:
    yield f"graph {graph.name} (opset {graph.opset}, {len(graph.nodes)} nodes)"
    yield from (f"input {port.name} = {value_text(port.value)}" for port in graph.inputs)
    yield from map(node_text, graph.nodes)
    yield from (f"output {port.name} = {value_text(port.value)}" for port in graph.outputs)


def value_text(value: Value) -> str:
    """A value's name, type and shape."""
    constant = "const " if value.constant is not None else ""
    return f"{value.name}: {constant}{value.dtype}[{','.join(map(str, value.shape))}]"
