"""Small decoders of every supported kind in GGUF files, with random weights, and what transformers computes of them.

    python -m tests.support.gguf_kinds tests/compiler/frontend/data/gguf_kinds.json

writes the logits. It needs torch and transformers, which read the GGUF files themselves; nothing of flashmem takes part.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

TOKENS = [5, 17, 250, 3, 99, 260, 7, 7, 130, 41, 201, 66]
"""The prompt."""

SHOWN = 24
"""So many logits after each token are compared."""

VOCABULARY = 300


@dataclass(frozen=True)
class SmallDecoder:
    """A decoder of a kind. `fields`: further ones of the kind. `extra`: what its layers have besides matrices and norms.

    `settings`: what transformers does not read from the file.
    """

    kind: str
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    key_heads: int = 2
    size: int = 16
    inner: int = 96
    fields: Mapping[str, int | float | str] = field(default_factory=dict)
    extra: frozenset[str] = frozenset()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        """Write the GGUF file, without a tokenizer."""
        writer, random = gguf.GGUFWriter(path, self.kind), np.random.default_rng(5)
        writer.add_block_count(self.layers)
        writer.add_context_length(256)
        writer.add_embedding_length(self.hidden)
        writer.add_feed_forward_length(self.inner)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.key_heads)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_vocab_size(VOCABULARY)
        writer.add_pad_token_id(0)  # transformers takes others for granted
        writer.add_eos_token_id(1)
        for name, value in self.fields.items():
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(f"{self.kind}.{name}", value)  # type: ignore[operator]
        for name, shape in self.shapes().items():
            if len(shape) == 1:
                array = random.normal(0, 0.5, shape) if name.endswith("bias") else random.uniform(0.5, 1.5, shape)
            else:
                array = random.standard_normal(shape) * 1.5 / np.sqrt(shape[1])
            writer.add_tensor(name, array.astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of the file."""
        queries, keys, hidden = self.heads * self.size, self.key_heads * self.size, self.hidden
        matrices: dict[str, tuple[int, ...]] = {"attn_output": (hidden, queries), "ffn_down": (hidden, self.inner)}
        if "fused" in self.extra:
            matrices |= {"attn_qkv": (queries + 2 * keys, hidden), "ffn_up": (2 * self.inner, hidden)}
        else:
            matrices |= {"attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden)}
            matrices |= {"ffn_gate": (self.inner, hidden), "ffn_up": (self.inner, hidden)}
        vectors: dict[str, tuple[int, ...]] = {"attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,)}
        if "biases" in self.extra:
            vectors |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
        if "all biases" in self.extra:
            vectors |= {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
        if "head norms" in self.extra:
            vectors |= {"attn_q_norm.weight": (self.size,), "attn_k_norm.weight": (self.size,)}
        if "post norms" in self.extra:
            vectors |= {"post_attention_norm.weight": (hidden,), "post_ffw_norm.weight": (hidden,)}
        found: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCABULARY, hidden), "output_norm.weight": (hidden,)}
        if "head" in self.extra:
            found["output.weight"] = (VOCABULARY, hidden)
        for layer in range(self.layers):
            found |= {f"blk.{layer}.{name}.weight": shape for name, shape in matrices.items()}
            found |= {f"blk.{layer}.{name}": shape for name, shape in vectors.items()}
        return found


KINDS = {
    "llama": SmallDecoder("llama", fields={"rope.freq_base": 5e5, "rope.dimension_count": 16}, extra=frozenset({"head"})),
    "qwen2": SmallDecoder("qwen2", fields={"rope.freq_base": 1e6}, extra=frozenset({"biases"})),
    "qwen3": SmallDecoder(
        "qwen3", heads=2, key_heads=1, size=128,
        fields={"rope.freq_base": 1e6, "attention.key_length": 128, "attention.value_length": 128},
        extra=frozenset({"head norms"}),
    ),
    "phi3": SmallDecoder(
        "phi3", key_heads=4, fields={"rope.dimension_count": 16}, extra=frozenset({"fused", "head"})
    ),
    "gemma2": SmallDecoder(
        "gemma2", layers=3, heads=2, key_heads=1, size=256,
        fields={
            "attention.key_length": 256, "attention.value_length": 256, "attention.sliding_window": 5,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
        extra=frozenset({"post norms"}),
    ),
    "gemma3": SmallDecoder(
        "gemma3", layers=7, heads=2, key_heads=1, size=256,
        fields={
            "attention.key_length": 256, "attention.value_length": 256, "attention.sliding_window": 5, "rope.freq_base": 1e6,
        },
        extra=frozenset({"post norms", "head norms"}),
    ),
}  # fmt: skip
"""One of each kind. The heads of Qwen 3 and Gemma have 128 and 256 elements, which transformers takes for granted."""


VARIANTS = {
    "llama biases": SmallDecoder(
        "llama", fields={"rope.dimension_count": 16}, extra=frozenset({"all biases"}),
        settings={"attention_bias": True, "mlp_bias": True},
    ),
    "llama linear": SmallDecoder(
        "llama", fields={"rope.dimension_count": 16, "rope.scaling.factor": 4.0},
        settings={"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "llama 2023": SmallDecoder(
        "llama", fields={"rope.dimension_count": 16, "rope.scale_linear": 2.0},
        settings={"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "llama unscaled": SmallDecoder(
        "llama", fields={"rope.dimension_count": 16, "rope.scaling.type": "none", "rope.scaling.factor": 4.0},
    ),
}  # fmt: skip
"""Llama with parts that few files have. A factor without a type is linear, and one of the type "none" has no effect, as in
llama.cpp."""


def main() -> None:
    """Write what transformers computes to the file that is named."""
    import torch
    from transformers import AutoModelForCausalLM

    made: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, decoder in {**KINDS, **VARIANTS}.items():
            file = decoder.write(Path(folder) / f"{name}.gguf")
            model = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager", **decoder.settings
            )
            with torch.no_grad():
                logits = model.eval()(torch.tensor([TOKENS])).logits[0]
            made[name] = [[round(float(each), 5) for each in row[:SHOWN]] for row in logits]
            print(name, type(model).__name__, model.config)
    Path(sys.argv[1]).write_text(json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
