"""Decoders of onnxruntime-genai, optimum and transformers.js, with a cache of fixed length that is written in place.

Such a file has inputs `input_ids`, `attention_mask`, perhaps `position_ids`, and for each layer `past_key_values.N.key` and
`.value`, whose outputs are `present.N.key` and `.value`. Afterwards the inputs are the tokens and their number up to the last
one (`flashmem.bundle.language`), and caches have a fixed number of places. In a batch, each row has its own number of tokens.
Two forms are known:

- GroupQueryAttention nodes read and write the caches, as in files of onnxruntime-genai.
- A Concat appends new keys and values, and scores get a mask, as in exports of transformers. New rows then replace those at
  their positions, and a mask of positions replaces the exported one, which is folded first to prove that it is causal.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from flashmem.base.errors import UserError
from flashmem.bundle.language import CHECKED_TOKENS, IDS, LOGITS, TOTAL
from flashmem.compiler.frontend.cleanup import clean_up
from flashmem.compiler.frontend.contrib import DOMAIN, OWN
from flashmem.compiler.operators import is_native

MASK = "attention_mask"
POSITIONS = "position_ids"
BRANCH = "use_cache_branch"
_PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")
_NEW = 3  # tokens for which masks are checked
_PRODUCTS = {"MatMul", "Gemm", "MatMulNBits", "MatMulInteger", "DynamicQuantizeMatMul"}
_UNARY = {"Cast", "Identity", "Tanh", "Mul", "Div", "Add", "Sub"}
"""Operators between the last product and the logits: conversions, a scale, a soft bound."""


@dataclass(frozen=True)
class CacheSize:
    """The size of the caches: `heads` of keys, `size` elements each, places for `length` tokens, in each row of the `batch`."""

    heads: int
    size: int
    length: int
    batch: int = 1


def with_fixed_cache(model: onnx.ModelProto, size: CacheSize, path: Path) -> None:
    """Change the decoder `model`, read from `path`, in place.

    Raises:
        UserError: a decoder of another form, with the name of what is unknown.
    """
    graph = model.graph
    _take_cached_branch(graph)
    given = {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer}
    made = {value.name for value in graph.output}
    pairs = {past: _PAST.sub(r"present.\1.\2", past) for past in sorted(given, key=_order) if _PAST.fullmatch(past)}
    if not pairs or IDS not in given or LOGITS not in made or not made.issuperset(pairs.values()):
        raise UserError(
            f"{path} is no decoder with a cache: it needs the inputs {IDS} and past_key_values.0.key, and the outputs "
            f"logits and present.0.key; export it with a cache (for optimum: --task text-generation-with-past)"
        )
    if unknown := sorted(given - {IDS, MASK, POSITIONS, *pairs}):
        raise UserError(f"{path} has the input {unknown[0]!r}, which decoders of a text do not have")
    rows = next(value for value in graph.input if value.name == IDS).type.tensor_type.shape.dim[:1]
    if rows and rows[0].dim_value not in (0, size.batch):
        raise UserError(
            f"{path} was exported for a batch of {rows[0].dim_value}; export it with an open batch, or compile it with that "
            "--batch"
        )
    decoder = _Decoder(graph, path, max(each.version for each in model.opset_import if each.domain in ("", "ai.onnx")))
    decoder.add("TokenPositions", [IDS, TOTAL], POSITIONS)
    if all(decoder.is_grouped(past) for past in pairs):
        decoder.count_in_attention(size.batch)
        decoder.add_mask(size)
    else:
        decoder.check_masks(len(pairs) // 2, size)
        decoder.find_positions(size)
        decoder.write_in_place(pairs)
    decoder.cut_rows(size.batch)
    decoder.finish(pairs, size)
    if not any(opset.domain == OWN for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(OWN, 1))


def _order(name: str) -> tuple[int, str]:
    found = _PAST.fullmatch(name)
    return (int(found[1]), found[2]) if found else (-1, name)


def _take_cached_branch(graph: onnx.GraphProto) -> None:
    """Replace the If of a merged decoder by its branch with a cache."""
    [*found] = [node for node in graph.node if node.op_type == "If" and node.input[0] == BRANCH]
    for node in found:
        branch = next(each.g for each in node.attribute if each.name == "then_branch")
        names = dict(zip((value.name for value in branch.output), node.output, strict=True))
        at = list(graph.node).index(node)
        inner = [deepcopy(each) for each in branch.node]
        for each in inner:
            each.input[:] = [names.get(name, name) for name in each.input]
            each.output[:] = [names.get(name, name) for name in each.output]
        rest = [*graph.node[:at], *inner, *graph.node[at + 1 :]]
        graph.initializer.extend(branch.initializer)
        del graph.node[:]
        graph.node.extend(rest)
    if found:
        _keep(graph.input, {value.name for value in graph.input} - {BRANCH})


def _keep(values: Any, names: Iterable[str]) -> None:
    """Keep those inputs or outputs that have these names."""
    kept = [deepcopy(value) for value in values if value.name in names]
    del values[:]
    values.extend(kept)


def _axis(concat: NodeProto) -> int:
    return int(next(each.i for each in concat.attribute if each.name == "axis"))


def _constant(value: ir.Value) -> NDArray[Any] | None:
    """The elements of a folded output, if it is constant."""
    node = value.producer()
    if node is not None:
        return node.attributes["value"].as_tensor().numpy() if node.op_type == "Constant" else None
    return None if value.const_value is None else value.const_value.numpy()


class _Decoder:
    """The graph of a decoder while it is changed."""

    def __init__(self, graph: onnx.GraphProto, path: Path, opset: int) -> None:
        self.graph = graph
        self.path = path
        self.opset = opset
        self.added: list[NodeProto] = []
        self._index()

    def _index(self) -> None:
        self.producer = {name: node for node in self.graph.node for name in node.output if name}
        self.users: dict[str, list[NodeProto]] = defaultdict(list)
        for node in self.graph.node:
            for name in node.input:
                self.users[name].append(node)

    def add(self, op: str, inputs: Sequence[str], output: str, domain: str = OWN, **attributes: Any) -> None:
        """Add a node before all others."""
        self.added.append(helper.make_node(op, inputs, [output], name=output, domain=domain, **attributes))

    def constant(self, name: str, array: NDArray[Any] | np.int32) -> str:
        """Add a constant."""
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def is_grouped(self, past: str) -> bool:
        """Whether grouped-query attention alone reads the cache `past`."""
        return all(node.domain == DOMAIN and node.op_type == "GroupQueryAttention" for node in self.users[past])

    # -- files of onnxruntime-genai

    def count_in_attention(self, batch: int) -> None:
        """Give grouped-query attention the numbers of tokens, which it has from the mask."""
        last = "flashmem.last"
        longest = TOTAL
        if batch > 1:
            longest = "flashmem.longest"
            self.add("ReduceMax", [TOTAL], longest, "", keepdims=0)
        for node in self.graph.node:
            if node.op_type == "GroupQueryAttention":
                node.input[5:7] = ["flashmem.seqlens_k", longest]
        self.add("Sub", [TOTAL, self.constant("flashmem.one", np.int32(1))], last, "")
        self.add("Reshape", [last, self.constant("flashmem.each", np.array([batch]))], "flashmem.seqlens_k", "")

    def add_mask(self, size: CacheSize) -> None:
        """Compute the mask of tokens that are there, for what else reads it."""
        if self.users[MASK]:
            keys = self.constant("flashmem.keys", np.arange(size.length, dtype=np.int32)[None])
            self.add("Reshape", [TOTAL, self.constant("flashmem.column", np.array([size.batch, 1]))], "flashmem.counts", "")
            self.add("Less", [keys, "flashmem.counts"], "flashmem.there", "")
            self.add("Cast", ["flashmem.there"], MASK, "", to=TensorProto.INT64)

    # -- exports of transformers

    def write_in_place(self, pairs: dict[str, str]) -> None:
        """Write new keys and values at their positions, and mask the scores by positions."""
        for past, present in pairs.items():
            node = self.producer.get(present)
            if node is None or node.op_type != "Concat" or list(node.input[:-1]) != [past] or _axis(node) not in (2, -2):
                kind = "nothing" if node is None else node.op_type
                raise UserError(
                    f"{self.path} has a cache of an unknown form: {present} is made by {kind}, not by a Concat of {past} "
                    f"and new rows along its third dimension"
                )
            node.op_type = "CacheWrite"
            node.domain = OWN
            node.name = node.name or present
            del node.attribute[:]
            node.input.append(POSITIONS)
        for softmax, scores, _ in self.attentions():
            name = f"{softmax.output[0]}.scores"
            masked = helper.make_node("CacheMask", [scores, POSITIONS], [name], name=name, domain=OWN)
            self.graph.node.insert(list(self.graph.node).index(softmax), masked)
            softmax.input[0] = name
        self._index()
        live = self.live([value.name for value in self.graph.output])
        counted = [node for node in live if MASK in node.input or (node.op_type == "Shape" and _PAST.match(node.input[0]))]
        if wrong := [node for node in counted if node.op_type != "Shape" or not self._is_fixed(node)]:
            raise UserError(
                f"{self.path} computes positions from {wrong[0].input[0]} ({wrong[0].name or wrong[0].op_type}), which is not "
                "supported; export it with the input position_ids"
            )

    def _is_fixed(self, shape: NodeProto) -> bool:
        """Whether all that is used of the shape of a cache are dimensions of fixed size."""
        indices = [self._integer(node.input[1]) for node in self.users[shape.output[0]] if node.op_type == "Gather"]
        return len(indices) == len(self.users[shape.output[0]]) and all(index in (0, 1, 3, -1) for index in indices)

    def _integer(self, name: str) -> int | None:
        tensor = next((each for each in self.graph.initializer if each.name == name), None)
        node = self.producer.get(name)
        if tensor is None and node is not None and node.op_type == "Constant":
            tensor = next((each.t for each in node.attribute if each.name == "value"), None)
        array = None if tensor is None else numpy_helper.to_array(tensor)
        return int(array.reshape(-1)[0]) if array is not None and array.size == 1 else None

    def attentions(self) -> Iterator[tuple[NodeProto, str, str]]:
        """Each softmax over a cache, its scores before masks, and after: sums and choices in which no cache takes part."""
        for node in list(self.graph.node):
            if node.op_type != "Softmax" or not self.reads_cache(node.input[0]):
                continue
            scores = node.input[0]
            while (step := self.producer[scores]).op_type in ("Add", "Where"):
                own = [name for name in step.input if self.reads_cache(name)]
                if len(own) != 1 or (step.op_type == "Where" and own[0] == step.input[0]):
                    break
                [scores] = own
            yield node, scores, node.input[0]

    def reads_cache(self, name: str) -> bool:
        """Whether elements of a cache, not only its shape, take part in a value."""
        return any(each.startswith("past_key_values.") for each in self.sources(name))

    def sources(self, name: str) -> set[str]:
        """The inputs and constants whose elements take part in a value."""
        found = set[str]()
        open_ = [name]
        seen = set[str]()
        while open_:
            each = open_.pop()
            if each in seen or not each:
                continue
            seen.add(each)
            node = self.producer.get(each)
            if node is None:
                found.add(each)
            elif node.op_type != "Shape":
                open_ += node.input
        return found

    def live(self, names: Iterable[str], known: Iterable[str] = ()) -> list[NodeProto]:
        """The nodes that these values need, if others are `known`."""
        needed = {*names} - {*known}
        kept = list[NodeProto]()
        for node in reversed(self.graph.node):
            if needed.intersection(node.output):
                kept.append(node)
                needed.update({*node.input} - {*known})
        return kept[::-1]

    def check_masks(self, layers: int, size: CacheSize) -> None:
        """Raise UserError unless each mask hides what comes later, and nothing else, also at the end of a full cache."""
        found = {masked: scores for _, scores, masked in self.attentions()}
        if len(found) != layers:
            raise UserError(f"{self.path} has {layers} layers with a cache, and {len(found)} softmax operators that read them")
        for past in self._lengths(size):
            zeros = np.zeros((1, 1, _NEW, past + _NEW), np.float32)
            expected = np.arange(past + _NEW) <= past + np.arange(_NEW)[:, None]
            for name, made in self._folded(found, past, size, dict.fromkeys(found.values(), zeros)).items():
                seen = None if made is None else np.broadcast_to(made, zeros.shape)[0, 0]
                if seen is None or not np.array_equal(seen == 0, expected) or (seen[~expected] > -1e4).any():
                    raise UserError(
                        f"{self.path} has a mask that is not causal with {past} earlier tokens ({name}); models with a window, "
                        f"with positions in their scores, or that see a whole text at once are not supported in this form"
                    )

    def find_positions(self, size: CacheSize) -> None:
        """Replace each Range from the number of earlier tokens on by the positions, which rows of a batch do not share."""
        ranges = {node.output[0]: node for node in self.graph.node if node.op_type == "Range"}
        for past in self._lengths(size):
            made = self._folded(ranges, past, size, {})
            expected = [*range(past, past + _NEW)]
            ranges = {
                name: node for name, node in ranges.items() if (each := made[name]) is not None and each.tolist() == expected
            }
        for name, node in ranges.items():
            for user in self.users[name]:
                if user.op_type == "Unsqueeze" and len(user.input) > 1 and self._integer(user.input[1]) == 0:
                    user.op_type = "Identity"
                    user.input[:] = [POSITIONS]
            if size.batch == 1:
                self.add("Reshape", [POSITIONS, self.constant(f"{name}.shape", np.array([-1]))], name, "")
                self.graph.node.remove(node)
        self._index()

    def _lengths(self, size: CacheSize) -> tuple[int, int]:
        """Numbers of earlier tokens: few of them, and so many that the cache becomes full."""
        return 5, size.length - _NEW

    def _folded(
        self, names: Collection[str], past: int, size: CacheSize, known: Mapping[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any] | None]:
        """What these values are for so many earlier tokens and `_NEW` new ones; None if it is not known when compiling."""
        arrays: dict[str, NDArray[Any]] = {MASK: np.ones((1, past + _NEW), np.int64), IDS: np.zeros((1, _NEW), np.int64)}
        arrays |= {POSITIONS: past + np.arange(_NEW)[None], **known}
        graph = onnx.GraphProto(name="masks", node=self.live(names, arrays))
        read = {name for node in graph.node for name in node.input} | {*names}
        graph.initializer.extend(each for each in self.graph.initializer if each.name in read)
        graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items() if name in read)
        shape = [1, size.heads, past, size.size]
        graph.input.extend(
            helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, shape)
            for value in self.graph.input
            if value.name in read and _PAST.fullmatch(value.name)
        )
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid(DOMAIN, 1)]
        try:
            folded = clean_up(helper.make_model(graph, opset_imports=opsets, ir_version=10), is_native)
        except UserError as error:
            raise UserError(f"{self.path} is a decoder of an unknown form: with {past} earlier tokens, {error}") from error
        return {str(output.name): _constant(output) for output in folded.graph.outputs}

    # -- both

    def cut_rows(self, batch: int) -> None:
        """Compute logits of the rows that need them: all of a few tokens in a batch of one, else the last one."""
        name = LOGITS
        while (node := self.producer.get(name)) is not None and node.op_type in _UNARY:
            name = next((each for each in node.input if each in self.producer), "")
        node = self.producer.get(name) or self.producer[LOGITS]
        if node.op_type not in _PRODUCTS or (node.op_type == "Gemm" and name != node.output[0]):
            raise UserError(f"{self.path} makes its logits by {node.op_type}, which is not supported; export it again")
        rows = "flashmem.rows"
        cut = helper.make_node(
            "LastRows", [node.input[0], IDS], [rows], name=rows, domain=OWN, few=CHECKED_TOKENS if batch == 1 else 1
        )
        self.graph.node.insert(list(self.graph.node).index(node), cut)
        self.producer[name].input[0] = rows

    def finish(self, pairs: dict[str, str], size: CacheSize) -> None:
        """The inputs and outputs, and the nodes in their order, without those that nothing needs."""
        graph = self.graph
        kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
        batch = size.batch
        shape: list[int | str] = [batch, size.heads, size.length, size.size]
        given = [helper.make_tensor_value_info(IDS, TensorProto.INT64, [batch, "tokens"])]
        given += [helper.make_tensor_value_info(TOTAL, TensorProto.INT32, [] if batch == 1 else [batch])]
        given += [helper.make_tensor_value_info(past, kinds[past], shape) for past in pairs]
        logits = next(value for value in graph.output if value.name == LOGITS)
        words = logits.type.tensor_type.shape.dim[-1]
        made = [helper.make_tensor_value_info(LOGITS, kinds[LOGITS], [batch, "rows", words.dim_value or words.dim_param])]
        made += [helper.make_tensor_value_info(present, kinds[present], shape) for present in pairs.values()]
        for values, new in ((graph.input, given), (graph.output, made)):
            del values[:]
            values.extend(new)
        del graph.value_info[:]
        nodes = [*self.added, *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)
        self._index()
        needed = [deepcopy(node) for node in self.live([value.name for value in made])]
        del graph.node[:]
        graph.node.extend(needed)
