"""States of a model: inputs that the next run reads as this run's outputs, such as a decoder's cache of keys and values.

An ONNX file has no such pairs: past and present are an input and an output of their own. Here the caller names them, or their
names tell. The memory of a cache of fixed length is then written in place (`flashmem.compiler.memory.states`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from flashmem.base.errors import UserError
from flashmem.base.types import States
from flashmem.compiler.ir.graph import Graph, GraphPort

_PAST = re.compile(r"^past(?:_key_values)?(?=[._])")
_PRESENTS = ("present", "present_key_values")


def named_states(inputs: Collection[str], outputs: Collection[str], wanted: States) -> tuple[tuple[str, str], ...]:
    """The pairs of input and output that `wanted` means, for a model with these.

    Raises:
        UserError: no such input or output, or an output in two pairs.
    """
    pairs = _found(inputs, outputs) if wanted == "auto" else dict(wanted)
    twice = [output for output, count in Counter(pairs.values()).items() if count > 1]
    if twice:
        raise UserError(f"the output {twice[0]!r} is given as the next value of two states; name another one")
    for past, present in pairs.items():
        for name, known, kind in ((past, inputs, "input"), (present, outputs, "output")):
            if name not in known:
                raise UserError(f"the model has no {kind} {name!r} for the state {past}={present}; it has: {', '.join(known)}")
    return tuple(pairs.items())


def _found(inputs: Collection[str], outputs: Collection[str]) -> dict[str, str]:
    """The pairs that names tell: `past_key_values.0.key` and `present.0.key`, `past_0` and `present_0`."""
    pairs = {}
    for past in inputs:
        presents = [_PAST.sub(name, past) for name in _PRESENTS] if _PAST.match(past) else []
        if known := [present for present in presents if present in outputs]:
            pairs[past] = known[0]
    if not pairs:
        raise UserError(
            "no input and output of the model are named as past and present of a state; name the pairs, as in --state h=h_next"
        )
    return pairs


def with_states(graph: Graph, pairs: Collection[tuple[str, str]]) -> Graph:
    """`graph` with the states `pairs`.

    Raises:
        UserError: a pair of different shapes or types, or without elements.
    """
    inputs, outputs = ({port.name: port for port in ports} for ports in (graph.inputs, graph.outputs))
    for past, present in pairs:
        _check(inputs[past], outputs[present])
    return replace(graph, states=tuple(pairs))


def _check(past: GraphPort, present: GraphPort) -> None:
    one = past.value
    other = present.value
    if one.shape != other.shape:
        raise UserError(
            f"the state {past.name}={present.name} changes its shape from {one.shape} to {other.shape}, and a state has one "
            f"place; export the model with a cache of fixed length, or give the input its final shape with --shape"
        )
    if past.dtype != present.dtype:
        raise UserError(f"the state {past.name}={present.name} changes its type from {past.dtype} to {present.dtype}")
    if not one.size:
        raise UserError(f"the state {past.name}={present.name} has no elements; give its input another shape with --shape")
