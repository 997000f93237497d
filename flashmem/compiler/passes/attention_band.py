"""Bands of attention: constant masks by which each query sees a run of keys that moves on with it, as causal ones do.

Such a mask needs no operand. Kernels compare the numbers of a query and a key, and do not read keys that no query sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.kernels.attention.operators import Band

LOWEST = -1e30
"""A score of this or less has no weight beside others."""

_ORDINARY = frozenset({"Mul", "Div", "Tanh", "Reshape"})
"""Operators on scores beside a mask. They hide no key."""


def split_band(product: Value, chain: Sequence[Node]) -> tuple[list[Node], Band] | None:
    """The operators of `chain` that hide the keys outside a band, and the band; None if there is none.

    Then every query sees a key whose score is ordinary, so hidden ones have no weight. `product` are the scores before `chain`.
    """
    inside = {product, *(node.outputs[0] for node in chain)}
    hiding = [node for node in chain if node.op not in _ORDINARY and not _adds_numbers(node, inside)]
    if not hiding:
        return None
    behind = chain[chain.index(hiding[0]) + 1 :]
    if any(node.op not in ("Add", "Reshape") and node not in hiding for node in behind):
        return None
    masks = [_seen(node, inside) for node in hiding]
    shape = hiding[0].outputs[0].shape[-2:]
    rows = product.shape[-2]
    if rows % shape[0] or any(node.outputs[0].shape[-2:] != shape for node in hiding):
        return None
    seen = np.ones(shape, bool)
    for mask in masks:
        if mask is None or mask.size != seen.size or mask.shape[-2:] != shape:
            return None
        seen &= mask.reshape(shape)
    band = band_of(seen)
    if band is None:
        return None
    return hiding, band if rows == shape[0] else replace(band, period=shape[0])


def _adds_numbers(node: Node, inside: set[Value]) -> bool:
    """Whether `node` adds constants that are no mask to scores."""
    if node.op not in ("Add", "Sub"):
        return False
    added = [value for value in node.inputs if value not in inside]
    return all(
        value is not None
        and value.constant is not None
        and bool((np.abs(value.constant.array().astype(np.float64)) < -LOWEST).all())
        for value in added
    )


def _seen(node: Node, inside: set[Value]) -> NDArray[np.bool_] | None:
    """Which scores `node` leaves as they are, if all others become `LOWEST` or less."""
    if node.op == "Where":
        condition, first, second = (node.input(i) for i in range(3))
        if condition.constant is None:
            return None
        seen = np.asarray(condition.constant.array(), bool)
        hidden, kept = (second, first) if first in inside else (first, second)
        if (
            kept not in inside
            or hidden.constant is None
            or not bool((hidden.constant.array().astype(np.float64) <= LOWEST).all())
        ):
            return None
        return seen if kept is first else ~seen
    if node.op == "Add":
        masks = [value for value in node.inputs if value not in inside]
        if len(masks) != 1 or masks[0] is None or masks[0].constant is None:
            return None
        mask = masks[0].constant.array().astype(np.float64)  # halves cannot be compared with LOWEST
        seen = mask == 0
        return seen if bool((seen | (mask <= LOWEST)).all()) else None
    return None


def band_of(seen: NDArray[np.bool_]) -> Band | None:
    """The band of the mask `seen`, [queries, keys]; None if it has none, hides no key, or a query sees no key."""
    rows, keys = seen.shape
    if not seen.any(axis=1).all() or seen.all():
        return None
    numbers = np.arange(rows)
    first = seen.argmax(axis=1)
    last = keys - 1 - seen[:, ::-1].argmax(axis=1)
    if (last - first + 1 != seen.sum(axis=1)).any():
        return None
    since = (first - numbers)[first > 0]
    until = (last - numbers)[last < keys - 1]
    band = Band(int(since[0]) if since.size else None, int(until[0]) if until.size else None)
    return band if np.array_equal(band.seen(rows, keys), seen) else None
