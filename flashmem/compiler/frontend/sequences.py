"""Sequences and optional values, resolved at compile time: a sequence is a list of known values, and none remains."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from flashmem.base.errors import UserError
from flashmem.compiler.frontend.editing import EditingPass, at, fit, sizes
from flashmem.compiler.frontend.validation import printable

SEQUENCES = frozenset(
    {
        "ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert",
        "SequenceLength", "SplitToSequence",
    }
)  # fmt: skip
"""The operators on sequences. SequenceMap is a Loop by ONNX's definition."""


class SequencePass(EditingPass):
    """Tracks the elements of each sequence and optional value, and replaces reads of them if the position is known."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Walk over the model once."""
        self.sequences: dict[ir.Value, list[ir.Value]] = {}
        self.optionals: dict[ir.Value, ir.Value | None] = {}
        return super().call(model)

    def resolvers(self) -> dict[str, Callable[[ir.Node], str | None]]:
        """Resolvers by operator."""
        optional = dict.fromkeys(("Optional", "OptionalGetElement", "OptionalHasElement"), self._optional)
        return {"Identity": self._identity, **optional, **dict.fromkeys(SEQUENCES, self._sequence)}

    def _sequence(self, node: ir.Node) -> str | None:
        """Record the values of a sequence, or replace a read of one."""
        op = node.op_type
        inputs = node.inputs
        late = f"{op} of a sequence that depends on data is not supported"
        if op in ("SequenceConstruct", "SequenceEmpty"):
            self.sequences[node.outputs[0]] = [value for value in inputs if value is not None]
            return None
        if op == "SplitToSequence":
            return late if self._split(node) is None else None
        items = self.sequences.get(inputs[0]) if inputs and inputs[0] is not None else None
        if items is None:
            return late
        index = 2 if op == "SequenceInsert" else 1
        place = inputs[index] if op not in ("SequenceLength", "ConcatFromSequence") and len(inputs) > index else None
        position = None if place is None else self.number(place)
        if place is not None and position is None:
            return f"{op} at a position computed at run time is not supported"
        end = len(items) + (op == "SequenceInsert")
        if position is not None and not -len(items) <= position < end:
            raise UserError(
                f"{op} node {printable(node.name or '')!r} selects element {position} of a sequence of {len(items)}"
            )
        if op == "SequenceInsert":
            fit(node, inputs[1] is not None)
            where = len(items) if position is None else int(position) % max(len(items), 1) if position < 0 else int(position)
            self.sequences[node.outputs[0]] = [*items[:where], inputs[1], *items[where:]]  # type: ignore[list-item]
        elif op == "SequenceErase":
            where = (len(items) - 1 if position is None else int(position)) % max(len(items), 1)
            self.sequences[node.outputs[0]] = [*items[:where], *items[where + 1 :]]
        elif op == "SequenceAt":
            fit(node, position is not None)
            self.replace(node, [items[int(position or 0)]])
        elif op == "SequenceLength":
            self.replace(node, [self.constant(node, np.array(len(items), np.int64))])
        else:
            axis = node.attributes.get_int("axis")
            fit(node, axis is not None)
            if not items:
                return "ConcatFromSequence of an empty sequence is not supported"
            if node.attributes.get_int("new_axis", 0):
                items = [self.with_axis(node, "Unsqueeze", value, axis or 0) for value in items]
            self.replace(node, [self.emit(node, "Concat", items, axis=axis)])
        return None

    def _split(self, node: ir.Node) -> list[ir.Value] | None:
        """The results of a SplitToSequence, by a Split; None if the shape, or the split, is unknown."""
        x = node.inputs[0]
        given = node.inputs[1] if len(node.inputs) > 1 else None
        axis = node.attributes.get_int("axis", 0) or 0
        if x is None or x.shape is None or not x.shape.is_static():
            return None
        fit(node, -len(x.shape) <= axis < len(x.shape))
        size = sizes(x)[axis]
        parts = np.array(1) if given is None else self.array(given)
        if parts is None:
            return None
        if parts.ndim == 0:
            fit(node, parts > 0)
            chunk = int(parts)
            parts = np.array([min(chunk, size - start) for start in range(0, size, chunk)], np.int64)
        fit(node, parts.sum() == size and bool((parts >= 0).all()) and parts.size > 0)
        self.count(parts.size)
        cuts = parts.astype(np.int64)
        inputs = [x]
        attributes = {"axis": axis}
        if self.opset >= 13:
            inputs.append(self.constant(node, cuts))
        else:
            attributes["split"] = cuts.tolist()
        split = ir.node("Split", inputs, attributes, num_outputs=cuts.size, name=f"{node.name}.split")
        at(node).insert_before(node, split)
        items = list(split.outputs)
        if given is None and not node.attributes.get_int("keepdims", 1):
            items = [self.with_axis(node, "Squeeze", value, axis) for value in items]
        construct = self.emit(node, "SequenceConstruct", items)
        self.sequences[construct] = items
        self.replace(node, [construct])
        return items

    def _identity(self, node: ir.Node) -> str | None:
        """A sequence or an optional value under another name."""
        x = node.inputs[0]
        y = node.outputs[0]
        if x in self.sequences:
            self.sequences[y] = self.sequences[x]
        if x in self.optionals:
            self.optionals[y] = self.optionals[x]
        return None

    def _optional(self, node: ir.Node) -> str | None:
        """Record the value of an optional, or replace a read of one."""
        late = f"{node.op_type} of a value that depends on data is not supported"
        x = node.inputs[0] if node.inputs else None
        if node.op_type == "Optional":
            self.optionals[node.outputs[0]] = x
            return None
        if x is not None and x not in self.optionals:
            if x.type is None or isinstance(x.type, ir.OptionalType):
                return late
            element: ir.Value | None = x
        else:
            element = None if x is None else self.optionals[x]
        if node.op_type == "OptionalHasElement":
            self.replace(node, [self.constant(node, np.array(element is not None))])
            return None
        if element is None:
            return "OptionalGetElement of an empty value has no result"
        self.replace(node, [element])
        return None
