"""Random weights for graphs of known architectures of any size, and random inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.compiler.ir.graph import ArrayConstant, Graph, Placeholder
from flashmem.program.program import Program


def random_inputs(program: Program, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Inputs of whole numbers: tokens from all of the vocabulary, or else less than 100."""
    random, rows = np.random.default_rng(seed), {each.indices: each.rows for each in program.host_embeddings}
    return {port.name: random.integers(0, rows.get(port.name, 100), port.shape).astype(port.dtype) for port in program.inputs}


def with_weights(graph: Graph, seed: int = 0) -> Graph:
    """`graph` with random weights: parts of few random arrays, so that many gigabytes of them take little time and memory."""
    values = [value for value in graph.constants() if isinstance(value.constant, Placeholder)]
    largest = max(int(np.prod(value.shape)) for value in values)
    random, drawn = np.random.default_rng(seed), {}
    users = {value: node for node in graph.nodes for value in node.inputs if value is not None}
    for value in values:
        shape, user = value.shape, users[value]
        if len(shape) == 1:
            ones = user.op == "LayerNormalization" and value.name.endswith("weight")
            array = np.full(shape, ones, np.float32) + random.standard_normal(shape, np.float32) * np.float32(0.1)
        else:
            depth = shape[0] if user.op == "MatMul" else shape[-1]
            if depth not in drawn:
                drawn[depth] = random.standard_normal(largest + (1 << 20), np.float32) * np.float32(depth**-0.5)
            first = int(random.integers(0, len(drawn[depth]) - int(np.prod(shape)) + 1))
            array = drawn[depth][first : first + int(np.prod(shape))].reshape(shape)
        value.constant = ArrayConstant(array)
    return graph
