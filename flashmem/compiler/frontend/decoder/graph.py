"""A decoder as an ONNX model with a cache of fixed length.

Each layer is RMS normalisation, grouped-query attention with rotary positions, and a gated MLP; kinds of models differ in what
`Decoder` holds, and in tensors that a file has or lacks. The model has the form of onnxruntime-genai's with
`past_present_share_buffer`: `past_key_values.*` and `present.*` have room for `max_length` tokens. A run reads the next tokens
[batch, tokens], and returns the logits [batch, rows, vocabulary] after the last one, or, in a batch of one, after each of
`CHECKED_TOKENS` or fewer. In a batch, each row has its own number of earlier tokens.

Projections of the same input are one product if their weights have the same format. Weights in ggml's
blocks are nodes `flashmem.Blocks` (`flashmem.compiler.frontend.contrib.quantized`). A file with a tensor that has no part in
this form is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from flashmem.bundle.language import BATCH_TOKENS, CHECKED_TOKENS, IDS, LOGITS, TOTAL
from flashmem.bundle.manifest import disk_errors
from flashmem.compiler.frontend.contrib import DOMAIN, OWN
from flashmem.compiler.frontend.decoder.description import Decoder, Rotary
from flashmem.compiler.frontend.decoder.file import DecoderFile
from flashmem.compiler.frontend.decoder.placed_data import PlacedData, Read
from flashmem.compiler.frontend.decoder.weights import BlockedMatrix, FileTensor, floats, matrix, sketched

TOKENS = "tokens"
"""The name of the open dimension."""


def write_decoder(
    path: Path, decoder: Decoder, file: DecoderFile, max_length: int, read: Read = matrix, batch: int = 1
) -> None:
    """Write the decoder to `path`, and its data beside it. `read`: makes weights of the file's tensors. `batch`: its rows.

    Raises:
        UserError: a tensor is missing, has an unknown format, or has no part in the decoder; or the disk has no room or fails.
    """
    data = PlacedData(path.parent / f"{path.stem}.data")
    writer = _Writer(decoder, file, max_length, read, data, batch)
    model = writer.model()
    file.check_tensors(writer.used)
    if read is not sketched:
        file.check_room(path.parent, data.nbytes)
    with disk_errors(path):
        onnx.save(model, path)
        data.write()


class _Writer:
    """Builds the graph, and gives the weights their places in `data` as they are named.

    `places`: tokens that the caches have room for. `used`: names of the tensors that have a part in the graph.
    """

    def __init__(self, decoder: Decoder, file: DecoderFile, max_length: int, read: Read, data: PlacedData, batch: int) -> None:
        self.decoder = decoder
        self.file = file
        self.read = read
        self.data = data
        self.batch = batch
        self.used: set[str] = set()
        self.places = max_length + (BATCH_TOKENS if batch > 1 else 0)
        self.nodes: list[onnx.NodeProto] = []
        self.kept: dict[str, onnx.TensorProto] = {}
        self.matrices: dict[tuple[str, ...], str] = {}

    def model(self) -> onnx.ModelProto:
        """The whole decoder."""
        decoder = self.decoder
        x = self.node("Gather", self.weights("token_embd.weight"), IDS, axis=0)
        if decoder.embedding_scale != 1:
            x = self.node("Mul", x, self.array("embedding_scale", np.array(decoder.embedding_scale, np.float32)))
        before = self.node("Sub", TOTAL, self.array("one", np.array(1, np.int32)))
        self.node("Reshape", before, self.array("each", np.array([self.batch])), outputs=("seqlens_k",))
        self.longest = TOTAL if self.batch == 1 else self.node("ReduceMax", TOTAL, keepdims=0)
        pairs: dict[str, str] = {}
        for layer in range(decoder.layers):
            x = self.layer(layer, x, pairs)
        last = self.norm(self.last(x), "output_norm.weight")
        head = "output.weight" if self.file.has("output.weight") else "token_embd.weight"
        product = self.projection(last, ["output"], head, outputs=() if decoder.logit_cap else (LOGITS,))
        if decoder.logit_cap:
            cap = self.array("logit_cap", np.array(decoder.logit_cap, np.float32))
            self.node("Mul", self.node("Tanh", self.node("Div", product, cap)), cap, outputs=(LOGITS,))
        batch = self.batch
        cache: list[int | str] = [batch, decoder.key_heads, self.places, decoder.size]
        given: list[tuple[str, int, list[int | str]]] = [(IDS, TensorProto.INT64, [batch, TOKENS])]
        given.append((TOTAL, TensorProto.INT32, [] if batch == 1 else [batch]))
        made: list[tuple[str, int, list[int | str]]] = [(LOGITS, TensorProto.FLOAT, [batch, "rows", decoder.vocabulary])]
        given += [(past, TensorProto.FLOAT, cache) for past in pairs]
        made += [(present, TensorProto.FLOAT, cache) for present in pairs.values()]
        inputs, outputs = ([helper.make_tensor_value_info(*each) for each in values] for values in (given, made))
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, list(self.kept.values()))
        opsets = [helper.make_opsetid(*each) for each in (("", 21), (DOMAIN, 1), (OWN, 1))]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def last(self, x: str) -> str:
        """The rows of `x` [batch, tokens, hidden] that need logits: all of a few tokens in a batch of one, else the last."""
        most = CHECKED_TOKENS if self.batch == 1 else 1
        count = self.node("Gather", self.node("Shape", IDS), self.array("single", np.array([1])), axis=0)
        few = self.node("LessOrEqual", count, self.array("few", np.array([most])))
        zero = self.array("zero", np.array([0]))
        end = self.array("end", np.array([np.iinfo(np.int64).max]))
        first = self.node("Where", few, zero, self.node("Sub", count, self.array("single", np.array([1]))))
        return self.node("Slice", x, first, end, self.array("single", np.array([1])))

    def layer(self, number: int, x: str, pairs: dict[str, str]) -> str:
        """A layer; its states are added to `pairs`."""
        name = f"blk.{number}"
        y = self.norm(x, f"{name}.attn_norm.weight")
        y = self.projection(self.attention(number, y, pairs), [f"{name}.attn_output"])
        x = self.node("Add", x, self.norm_if_any(y, f"{name}.post_attention_norm.weight"))
        y = self.mlp(name, self.norm(x, f"{name}.ffn_norm.weight"))
        return self.node("Add", x, self.norm_if_any(y, f"{name}.post_ffw_norm.weight"))

    def attention(self, number: int, x: str, pairs: dict[str, str]) -> str:
        """Attention of a layer, before its output projection."""
        name = f"blk.{number}"
        decoder = self.decoder
        states = {f"past_key_values.{number}.{kind}": f"present.{number}.{kind}" for kind in ("key", "value")}
        pairs |= states
        read = self.queries_keys_values(name, x)
        cos, sin = self.angles(decoder.rotary[number])
        fields: dict[str, Any] = {"num_heads": decoder.heads, "kv_num_heads": decoder.key_heads, "do_rotary": 1}
        fields |= {"rotary_interleaved": int(decoder.interleaved)}
        fields |= {"local_window_size": decoder.windows[number]} if decoder.windows[number] else {}
        fields |= {"scale": decoder.scale} if decoder.scale else {}
        fields |= {"softcap": decoder.score_cap} if decoder.score_cap else {}
        outputs = (f"{name}.attention", *states.values())
        inputs = [*read, *states, "seqlens_k", self.longest, cos, sin]
        return self.node("GroupQueryAttention", *inputs, outputs=outputs, domain=DOMAIN, **fields)

    def queries_keys_values(self, name: str, x: str) -> list[str]:
        """The first three inputs of attention: all in the first one, if one product makes them and no norm comes between."""
        decoder = self.decoder
        has = self.file.has
        sizes = [decoder.size * count for count in (decoder.heads, decoder.key_heads, decoder.key_heads)]
        names = [f"{name}.attn_qkv"] if has(f"{name}.attn_qkv.weight") else [f"{name}.attn_{each}" for each in "qkv"]
        normed = has(f"{name}.attn_q_norm.weight")
        parts = self.projections(x, names, sizes if normed else [])
        if normed:
            parts[:2] = (self.head_norm(part, f"{name}.attn_{of}_norm.weight") for part, of in zip(parts, "qk", strict=False))
        return parts if len(parts) == 3 else [*parts, "", ""]

    def mlp(self, name: str, x: str) -> str:
        """The gated MLP. Some files have the gate's weights above the others, in one tensor."""
        rows = self.tensor(f"{name}.ffn_down.weight").shape[1]
        is_joined = not self.file.has(f"{name}.ffn_gate.weight")
        names = [f"{name}.ffn_up"] if is_joined else [f"{name}.ffn_gate", f"{name}.ffn_up"]
        gate, up = self.projections(x, names, [rows, rows])
        if self.decoder.gelu:
            active = self.node("Gelu", gate, approximate="tanh")
        else:
            active = self.node("Mul", gate, self.node("Sigmoid", gate))
        return self.projection(self.node("Mul", active, up), [f"{name}.ffn_down"])

    def projections(self, x: str, names: list[str], sizes: list[int]) -> list[str]:
        """Products of `x` with several weights: one if they have one format, split to `sizes` unless these are empty."""
        if len({self.tensor(f"{name}.weight").kind for name in names}) > 1:
            return [self.projection(x, [name]) for name in names]
        product = self.projection(x, names)
        if not sizes:
            return [product]
        parts = [f"{product}.{i}" for i in range(len(sizes))]
        self.node("Split", product, self.array(f"sizes.{sizes}", np.array(sizes)), outputs=parts, axis=2)
        return parts

    def projection(self, x: str, names: Sequence[str], weight: str = "", outputs: Sequence[str] = ()) -> str:
        """x times the transposed weights of these names, one below the other, plus the biases that the file has.

        `weight`: the tensor's name, if it is another one.
        """
        weights = [weight] if weight else [f"{name}.weight" for name in names]
        if not any(self.file.has(f"{name}.bias") for name in names):
            return self.product(x, *weights, outputs=outputs)
        biases = [
            floats(self.tensor(f"{name}.bias")) if self.file.has(f"{name}.bias") else np.zeros(self.height(each), np.float32)
            for name, each in zip(names, weights, strict=True)
        ]
        bias = self.array(f"{names[0]}.bias", np.concatenate(biases))
        return self.node("Add", self.product(x, *weights), bias, outputs=outputs)

    def product(self, x: str, *names: str, outputs: Sequence[str] = ()) -> str:
        """x times the transposed matrices [rows, depth] of these names, one below the other."""
        transposed = self.node("Transpose", self.weights(*names), perm=(1, 0))
        return self.node("MatMul", x, transposed, outputs=outputs)

    def weights(self, *names: str) -> str:
        """The matrices of these names, one below the other [rows, depth]."""
        if names not in self.matrices:
            example, array = self.data.matrix(names[0], [self.tensor(name) for name in names], self.read)
            self.kept[array.name] = array
            kind = example.kind if isinstance(example, BlockedMatrix) else ""
            self.matrices[names] = self.node("Blocks", array.name, domain=OWN, kind=kind) if kind else array.name
        return self.matrices[names]

    def height(self, name: str) -> int:
        """The rows of a matrix."""
        return self.tensor(name).shape[0]

    def tensor(self, name: str) -> FileTensor:
        """A tensor that has a part in the graph."""
        self.used.add(name)
        return self.file.tensor(name)

    def angles(self, rotary: Rotary) -> tuple[str, str]:
        """The cosines and sines of all positions, [length, size / 2]."""
        half = rotary.size // 2
        frequencies = rotary.base ** (-np.arange(half) / half) / rotary.factor
        if self.file.has("rope_freqs.weight"):  # of Llama 3.1 and later
            frequencies /= floats(self.tensor("rope_freqs.weight"))
        name = f"{rotary.base:.9g}" + (f".{rotary.factor:.9g}" if rotary.factor != 1 else "")
        angles = np.arange(self.places)[:, None] * frequencies
        cos, sin = (self.array(f"{of.__name__}.{name}", of(angles).astype(np.float32)) for of in (np.cos, np.sin))
        return cos, sin

    def norm(self, x: str, name: str) -> str:
        """RMS normalisation of the last dimension."""
        scale = self.array(name, floats(self.tensor(name)))
        return self.node("SimplifiedLayerNormalization", x, scale, epsilon=self.decoder.epsilon, axis=-1)

    def norm_if_any(self, x: str, name: str) -> str:
        """`x` normalised if the file has the scale for it."""
        return self.norm(x, name) if self.file.has(name) else x

    def head_norm(self, x: str, name: str) -> str:
        """RMS normalisation of each head of `x`, [batch, tokens, heads * size]."""
        heads = self.node("Reshape", x, self.array("heads", np.array([self.batch, 0, -1, self.decoder.size])))
        return self.node("Reshape", self.norm(heads, name), self.array("flat", np.array([self.batch, 0, -1])))

    def array(self, name: str, array: NDArray[Any]) -> str:
        """A constant, in the data file unless it is small."""
        if name not in self.kept:
            is_large = array.nbytes > 1024
            self.kept[name] = self.data.array(name, array) if is_large else numpy_helper.from_array(array, name)
        return name

    def node(self, op: str, *inputs: str, outputs: Sequence[str] = (), domain: str = "", **attributes: Any) -> str:
        """A node; returns its first output."""
        made = list(outputs) or [f"{op}.{len(self.nodes)}"]
        self.nodes.append(helper.make_node(op, list(inputs), made, name=made[0], domain=domain, **attributes))
        return made[0]
