"""Small language models in GGUF files, and what they compute: a decoder of the kind "llama" in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Format
from gguf import quants
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

Array = NDArray[Any]

TEMPLATE = r"""{%- for message in messages %}
{%- if loop.first and message['role'] != 'system' %}
{{- '<|im_start|>system\nBe brief.<|im_end|>\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}"""

CORPUS = (
    "A decoder reads one token after the other, and keeps what it computed of earlier ones. It's 37.5 times as fast, is it?\n"
    "The naïve way — reading all again — costs 1,024 reads. „Größe“ ist nicht alles; 東京は日本の首都です。 "
    "Привет, мир!\tEnd\r\n\r\n  and   so on…\nThey'll say we've won: 3² + 4² = 5², ½ of it, x_1 <- y; "
    'def f(a): return {"k": [a, None]}  # Ⅷ é e\u0301 🙂🙃\n'
)
"""Letters, numbers and marks of several scripts, contractions, and white space of several kinds."""

HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,)}
"""The places of numbers in float16 in blocks that the package gguf does not write: a scale and, in some, one for minima."""


def random_blocks(kind: str, rows: int, depth: int, random: np.random.Generator, scale: float = 1.0) -> Array:
    """Bytes of a matrix in one of those formats: any codes, and weights of about that standard deviation; some are 0."""
    weights, size = gguf.GGML_QUANT_SIZES[Format[kind]]
    data = random.integers(0, 256, (rows * depth // weights, size), np.uint8)
    for factors in (np.ones(len(data)), random.uniform(-1, 1, len(data)) * (np.arange(len(data)) % 5 > 0)):
        for at in HALVES[kind]:
            data[:, at : at + 2] = (scale * factors).astype("<f2").view(np.uint8).reshape(-1, 2)
        scale /= float(quants.dequantize(data, Format[kind]).std()) or 1.0
    return data.reshape(rows, -1)


CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@cache
def vocabulary(size: int = 400) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges of byte pairs that were learned from `CORPUS`, the control tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(CONTROLS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.decoder = decoders.ByteLevel()
    numbers = tokenizer.get_vocab()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return sorted(numbers, key=numbers.__getitem__), [tuple(each) for each in merges]


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def sentence_pieces() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types: byte pairs with spaces as characters, learned from `CORPUS`; rarer characters are bytes."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=260, special_tokens=["<unk>"], limit_alphabet=40, show_progress=False)
    made.train_from_iterator([CORPUS.replace("\n", "")], trainer)
    numbers = made.get_vocab()
    learned = [token for token in sorted(numbers, key=numbers.__getitem__) if token != "<unk>"]
    tokens = ["<unk>", "<s>", "</s>", "<|end|>", *BYTES, *learned]
    types = [2, 3, 3, 3, *[6] * 256, *[1] * len(learned)]
    return tokens, [0.0] * 260 + [-float(rank) for rank in range(len(learned))], types


@dataclass(frozen=True)
class SmallLlama:
    """A decoder with random weights. `formats`: of the matrices in turn; of the embedding table `table`; `head`: its own.

    `pieces`: the tokenizer is SentencePiece's.
    """

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    key_heads: int = 2
    inner: int = 96
    context: int = 256
    formats: tuple[str, ...] = ("Q4_1", "Q4_0", "Q8_0", "F16")
    table: str = "Q8_0"
    head: str | None = None
    base: float = 1e4
    epsilon: float = 1e-5
    factors: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    pieces: bool = False
    template: str = TEMPLATE

    @property
    def size(self) -> int:
        """Elements of a head."""
        return self.hidden // self.heads

    def arrays(self) -> dict[str, tuple[str, Array]]:
        """The format and the float weights of each tensor."""
        random, tokens = np.random.default_rng(3), len(sentence_pieces()[0] if self.pieces else vocabulary()[0])
        keys = self.key_heads * self.size
        shapes = {"attn_q": (self.hidden, self.hidden), "attn_k": (keys, self.hidden), "attn_v": (keys, self.hidden)}
        shapes |= {"attn_output": (self.hidden, self.hidden), "ffn_down": (self.hidden, self.inner)}
        shapes |= {"ffn_gate": (self.inner, self.hidden), "ffn_up": (self.inner, self.hidden)}
        found: dict[str, tuple[str, Array]] = {
            "token_embd.weight": (self.table, random.normal(0.1, 1.0, (tokens, self.hidden))),
            "output_norm.weight": ("F32", random.uniform(0.5, 1.5, self.hidden)),
        }
        if self.head is not None:
            found["output.weight"] = self.head, random.normal(0, 0.3, (tokens, self.hidden))
        if self.factors:
            found["rope_freqs.weight"] = "F32", np.linspace(1, 8, self.size // 2)
        for layer in range(self.layers):
            for number, (name, shape) in enumerate(shapes.items()):
                scale = 1.5 / np.sqrt(shape[1])
                found[f"blk.{layer}.{name}.weight"] = (
                    self.formats[(layer + number) % len(self.formats)],
                    scale * random.standard_normal(shape) + 0.02 * (number % 3),
                )
            for name in ("attn_norm", "ffn_norm"):
                found[f"blk.{layer}.{name}.weight"] = "F32", random.uniform(0.5, 1.5, self.hidden)
        return found

    def write(self, path: Path, most_tensors: int = 0) -> Path:
        """Write the GGUF file, or with `most_tensors` parts of so many beside it."""
        writer = gguf.GGUFWriter(path, "llama", split_max_tensors=most_tensors)
        writer.add_block_count(self.layers)
        writer.add_context_length(self.context)
        writer.add_embedding_length(self.hidden)
        writer.add_feed_forward_length(self.inner)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.key_heads)
        writer.add_rope_freq_base(self.base)
        writer.add_rope_dimension_count(self.size)
        writer.add_layer_norm_rms_eps(self.epsilon)
        self._add_tokenizer(writer)
        writer.add_chat_template(self.template)
        for name, value in self.fields.items():
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](name, value)  # type: ignore[operator]
        for name, (kind, data) in self.blocks.items():
            writer.add_tensor(name, data, raw_dtype=Format[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _add_tokenizer(self, writer: gguf.GGUFWriter) -> None:
        if self.pieces:
            tokens, scores, types = sentence_pieces()
            writer.add_tokenizer_model("llama")
            writer.add_token_scores(scores)
            writer.add_bos_token_id(1)
            writer.add_eos_token_id(2)
        else:
            tokens, merges = vocabulary()
            types = [3 if token in CONTROLS else 1 for token in tokens]
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre("smollm")
            writer.add_token_merges([" ".join(pair) for pair in merges])
            writer.add_eos_token_id(tokens.index("<|im_end|>"))
        writer.add_token_list(tokens)
        writer.add_token_types(types)

    @cached_property
    def blocks(self) -> dict[str, tuple[str, Array]]:
        """The format and the bytes of each tensor."""
        random = np.random.default_rng(11)
        return {
            name: (kind, random_blocks(kind, *array.shape, random, float(array.std())))
            if kind in HALVES
            else (kind, quants.quantize(array.astype(np.float32), Format[kind]))
            for name, (kind, array) in self.arrays().items()
        }

    @cached_property
    def stored(self) -> dict[str, Array]:
        """The weights as the file stores them, in float64."""
        return {name: quants.dequantize(data, Format[kind]).astype(np.float64) for name, (kind, data) in self.blocks.items()}

    def logits(self, tokens: list[int], cache: Callable[[str, Array], Array] = lambda name, rows: rows) -> Array:
        """The logits of each token [tokens, vocabulary] in float64.

        `cache` maps the name of a state and its rows [tokens, key heads, size] to the rows that attention reads.
        """
        stored = self.stored
        table, count = stored["token_embd.weight"], len(tokens)
        x = table[tokens]

        def norm(values: Array, name: str) -> Array:
            return values / np.sqrt((values**2).mean(-1, keepdims=True) + self.epsilon) * stored[name]

        pairs = np.arange(self.size // 2)
        angles = np.arange(count)[:, None] * self.base ** (-2 * pairs / self.size) / stored.get("rope_freqs.weight", 1.0)

        def rotated(values: Array) -> Array:
            """Neighbouring elements of each head [tokens, heads, size] turned by the angle of their position."""
            turned = (values[..., 0::2] + 1j * values[..., 1::2]) * np.exp(1j * angles)[:, None]
            return np.stack([turned.real, turned.imag], -1).reshape(values.shape)

        causal = np.where(np.tri(count) > 0, 0.0, -np.inf)
        for layer in range(self.layers):
            weight = {name: stored[f"blk.{layer}.{name}.weight"] for name in _MATRICES}
            y = norm(x, f"blk.{layer}.attn_norm.weight")
            q, k, v = (
                (y @ weight[f"attn_{each}"].T).reshape(count, heads, self.size)
                for each, heads in (("q", self.heads), ("k", self.key_heads), ("v", self.key_heads))
            )
            shared = self.heads // self.key_heads
            k, v = (cache(f"past_key_values.{layer}.{each}", rows) for each, rows in (("key", rotated(k)), ("value", v)))
            q, k, v = rotated(q), np.repeat(k, shared, 1), np.repeat(v, shared, 1)
            scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(self.size) + causal
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            attended = np.einsum("hij,jhd->ihd", scores / scores.sum(-1, keepdims=True), v)
            x = x + attended.reshape(count, self.hidden) @ weight["attn_output"].T
            y = norm(x, f"blk.{layer}.ffn_norm.weight")
            gate, up = y @ weight["ffn_gate"].T, y @ weight["ffn_up"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ weight["ffn_down"].T
        last: Array = norm(x, "output_norm.weight") @ stored.get("output.weight", table).T
        return last

    def greedy(
        self,
        tokens: list[int],
        count: int,
        margin: float,
        cache: Callable[[str, Array], Array] = lambda name, rows: rows,
    ) -> list[int]:
        """The likeliest tokens after `tokens`, up to one that ends the text, or leads by less than `margin` of the range.

        `cache` as for `logits`.
        """
        found: list[int] = []
        while len(found) < count:
            logits = self.logits([*tokens, *found], cache)[-1]
            second, first = np.argsort(logits)[-2:]
            if logits[first] - logits[second] < margin * np.ptp(logits) or vocabulary()[0][first] in CONTROLS:
                break
            found.append(int(first))
        return found


_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def plain_head(model: SmallLlama) -> SmallLlama:
    """The same with weights of floats, a head of its own, and the factors of Llama 3.1's rotary positions."""
    return replace(model, formats=("F32", "F16"), table="F16", head="F32", factors=True, base=5e5)
