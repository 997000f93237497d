"""The decoder of a GGUF file of the kind "llama" (Llama, SmolLM) as an ONNX model with a cache of fixed length.

Each layer is RMS normalisation, grouped-query attention with rotary positions, and a gated MLP. The model has the form of
onnxruntime-genai's with `past_present_share_buffer`: `past_key_values.*` and `present.*` have room for `max_length` words. A
run reads the ids of the next words [1, words], and returns the logits [1, 1, vocabulary] of the last one.

llama.cpp pairs neighbouring elements of a head for rotary positions, and its files have the rows of queries and keys in that
order; GroupQueryAttention does the same with `rotary_interleaved`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from flashmem.compiler.frontend.gguf.weights import BLOCK, BlockedMatrix, blocked_matrix, floats

IDS, TOTAL, LOGITS, WORDS = "input_ids", "total_sequence_length", "logits", "words"
"""Names of the inputs (ids of words; the number of all words up to the last one), of the output, and of the open dimension."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder. `base` is that of the rotary angles, `epsilon` that of the normalisation."""

    layers: int
    hidden: int
    heads: int
    key_heads: int
    size: int  # of a head
    vocabulary: int
    base: float
    epsilon: float


def write_decoder(path: Path, sizes: Sizes, tensor: Callable[[str], Any], has: Callable[[str], bool], max_length: int) -> None:
    """Write the decoder with weights from `tensor(name)`, and its data beside it.

    Raises:
        UserError: a tensor is missing or has an unknown format.
    """
    with (path.parent / f"{path.stem}.data").open("wb") as data:
        onnx.save(_Writer(sizes, tensor, has, max_length, data).model(), path)


class _Writer:
    """Builds the graph, and writes the weights to `data` as they are named."""

    def __init__(
        self, sizes: Sizes, tensor: Callable[[str], Any], has: Callable[[str], bool], max_length: int, data: Any
    ) -> None:
        self.sizes, self.tensor, self.has, self.max_length, self.data = sizes, tensor, has, max_length, data
        self.nodes: list[onnx.NodeProto] = []
        self.kept: list[onnx.TensorProto] = []

    def model(self) -> onnx.ModelProto:
        """The whole decoder."""
        sizes = self.sizes
        table = self.table("token_embd.weight")
        x = self.embedding(table)
        self.positions()
        pairs: dict[str, str] = {}
        for layer in range(sizes.layers):
            x = self.layer(layer, x, pairs)
        last = self.node("Gather", x, self.array("last", np.array([-1])), axis=1)
        head = self.table("output.weight") if self.has("output.weight") else table
        self.product(self.norm(last, "output_norm.weight"), "head", head, outputs=(LOGITS,))
        cache: list[int | str] = [1, sizes.key_heads, self.max_length, sizes.size]
        given: list[tuple[str, int, list[int | str]]] = [(IDS, TensorProto.INT64, [1, WORDS]), (TOTAL, TensorProto.INT32, [])]
        made: list[tuple[str, int, list[int | str]]] = [(LOGITS, TensorProto.FLOAT, [1, 1, sizes.vocabulary])]
        given += [(past, TensorProto.FLOAT, cache) for past in pairs]
        made += [(present, TensorProto.FLOAT, cache) for present in pairs.values()]
        inputs, outputs = ([helper.make_tensor_value_info(*each) for each in values] for values in (given, made))
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, self.kept)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def embedding(self, table: BlockedMatrix | NDArray[np.float32]) -> str:
        """The rows of the words' embeddings [1, words, hidden]."""
        if isinstance(table, np.ndarray):
            return self.node("Gather", self.array("token_embd", table), IDS, axis=0)
        codes = self.node("Gather", self.array("token_embd", table.centred()), IDS, axis=0)
        scales = self.node("Gather", self.array("token_embd.scales", table.scales[..., None]), IDS, axis=0)
        split = self.array("split", np.array([1, -1, self.sizes.hidden // BLOCK, BLOCK]))
        rows = self.node("Mul", self.node("Reshape", self.node("Cast", codes, to=TensorProto.FLOAT), split), scales)
        if table.zeros is not None:
            beyond = (table.zeros - table.middle) * table.scales
            rows = self.node("Sub", rows, self.node("Gather", self.array("token_embd.beyond", beyond[..., None]), IDS, axis=0))
        return self.node("Reshape", rows, self.array("joined", np.array([1, -1, self.sizes.hidden])))

    def positions(self) -> None:
        """The cosines and sines of all positions, and the last position."""
        half = self.sizes.size // 2
        frequencies = self.sizes.base ** (-np.arange(half) / half)
        if self.has("rope_freqs.weight"):  # of Llama 3.1 and later
            frequencies /= floats(self.tensor("rope_freqs.weight"))
        angles = np.arange(self.max_length)[:, None] * frequencies
        self.array("cos", np.cos(angles).astype(np.float32))
        self.array("sin", np.sin(angles).astype(np.float32))
        before = self.node("Sub", TOTAL, self.array("one", np.array(1, np.int32)))
        self.node("Reshape", before, self.array("single", np.array([1])), outputs=("seqlens_k",))

    def layer(self, number: int, x: str, pairs: dict[str, str]) -> str:
        """A layer; its states are added to `pairs`."""
        name, sizes = f"blk.{number}", self.sizes
        states = {f"past_key_values.{number}.{kind}": f"present.{number}.{kind}" for kind in ("key", "value")}
        pairs |= states
        y = self.norm(x, f"{name}.attn_norm.weight")
        q, k, v = (self.weighted(y, f"{name}.attn_{each}.weight") for each in "qkv")
        read = [q, k, v, *states, "seqlens_k", TOTAL, "cos", "sin"]
        fields = {"num_heads": sizes.heads, "kv_num_heads": sizes.key_heads, "do_rotary": 1, "rotary_interleaved": 1}
        outputs = (f"{name}.attention", *states.values())
        attended = self.node("GroupQueryAttention", *read, outputs=outputs, domain="com.microsoft", **fields)
        x = self.node("Add", x, self.weighted(attended, f"{name}.attn_output.weight"))
        y = self.norm(x, f"{name}.ffn_norm.weight")
        gate, up = (self.weighted(y, f"{name}.ffn_{each}.weight") for each in ("gate", "up"))
        gated = self.node("Mul", self.node("Mul", gate, self.node("Sigmoid", gate)), up)
        return self.node("Add", x, self.weighted(gated, f"{name}.ffn_down.weight"))

    def norm(self, x: str, name: str) -> str:
        """RMS normalisation of the last dimension."""
        scale = self.array(name, floats(self.tensor(name)))
        return self.node("SimplifiedLayerNormalization", x, scale, epsilon=self.sizes.epsilon, axis=-1)

    def weighted(self, x: str, name: str) -> str:
        """The product with the weight `name`."""
        return self.product(x, name, self.table(name))

    def product(self, x: str, name: str, weight: BlockedMatrix | NDArray[np.float32], outputs: Sequence[str] = ()) -> str:
        """x times the transposed matrix [rows, depth]."""
        if isinstance(weight, np.ndarray):
            return self.node("MatMul", x, self.array(f"{name}.t", np.ascontiguousarray(weight.T)), outputs=outputs)
        rows, depth = weight.shape
        codes = weight.codes.reshape(rows, depth // BLOCK, -1)
        read = [x, self.array(f"{name}.codes", codes), self.array(f"{name}.scales", weight.scales.reshape(-1))]
        if weight.zeros is not None:
            read.append(self.array(f"{name}.zeros", weight.zeros.reshape(-1)))
        fields = {"K": depth, "N": rows, "bits": weight.bits, "block_size": BLOCK}
        return self.node("MatMulNBits", *read, outputs=outputs, domain="com.microsoft", **fields)

    def table(self, name: str) -> BlockedMatrix | NDArray[np.float32]:
        """The weight `name`: in blocks, or of floats."""
        tensor = self.tensor(name)
        matrix = blocked_matrix(tensor)
        return floats(tensor) if matrix is None else matrix

    def array(self, name: str, array: NDArray[Any]) -> str:
        """A constant, in the data file unless it is small."""
        if all(each.name != name for each in self.kept):
            proto = numpy_helper.from_array(array, name)
            if array.nbytes > 1024:
                self.data.seek(-self.data.tell() % 4096, 1)
                onnx.external_data_helper.set_external_data(
                    proto, Path(self.data.name).name, offset=self.data.tell(), length=array.nbytes
                )
                self.data.write(proto.raw_data)
                proto.ClearField("raw_data")
                proto.data_location = TensorProto.EXTERNAL
            self.kept.append(proto)
        return name

    def node(self, op: str, *inputs: str, outputs: Sequence[str] = (), domain: str = "", **attributes: Any) -> str:
        """A node; returns its first output."""
        made = list(outputs) or [f"{op}.{len(self.nodes)}"]
        self.nodes.append(helper.make_node(op, list(inputs), made, name=made[0], domain=domain, **attributes))
        return made[0]
