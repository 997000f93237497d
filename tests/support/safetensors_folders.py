"""Small decoders in folders as transformers writes them, with random weights, and what transformers computes of them.

    python -m tests.support.safetensors_folders tests/compiler/frontend/safetensors/logits.json

writes the logits. It needs torch and transformers, which read the folders themselves; nothing of flashmem takes part.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOKENS = [int(each) for each in np.random.default_rng(7).integers(0, 300, 100)]
"""The prompt."""

AT = (8, 100)
"""The numbers of tokens after which logits are compared."""

SHOWN = 24
"""So many logits after the last token are compared."""

VOCABULARY = 300


def stored(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Numbers in a type of safetensors; those of BF16 as the bits in uint16."""
    if dtype == "BF16":
        return ((array.astype(np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
    return array.astype({"F32": np.float32, "F16": np.float16}[dtype])


@dataclass(frozen=True)
class SmallFolder:
    """A decoder of the kind `model_type`. `given`: further keys of its settings. `dtype`: of its tensors, in safetensors."""

    model_type: str
    dtype: str
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    key_heads: int = 2
    size: int = 16
    inner: int = 96
    given: Mapping[str, Any] = field(default_factory=dict)
    fused: bool = False
    biases: tuple[str, ...] = ()
    head_norms: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return {
            "architectures": ["AForCausalLM"], "model_type": self.model_type, "hidden_size": self.hidden,
            "vocab_size": VOCABULARY, "intermediate_size": self.inner, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.key_heads, "head_dim": self.size,
            "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "initializer_range": 0.02, "attention_dropout": 0.0,
            "use_cache": True, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **self.given,
        }  # fmt: skip

    @property
    def is_gemma(self) -> bool:
        """Whether norms are on both sides of each part."""
        return self.model_type.startswith("gemma")

    def tensors(self) -> dict[str, NDArray[Any]]:
        """The tensors under the names of transformers."""
        queries, keys = self.heads * self.size, self.key_heads * self.size
        matrices = {"self_attn.o_proj": (self.hidden, queries), "mlp.down_proj": (self.hidden, self.inner)}
        if self.fused:
            matrices |= {"self_attn.qkv_proj": (queries + 2 * keys, self.hidden)}
            matrices |= {"mlp.gate_up_proj": (2 * self.inner, self.hidden)}
        else:
            each = zip("qkv", (queries, keys, keys), strict=True)
            matrices |= {f"self_attn.{part}_proj": (rows, self.hidden) for part, rows in each}
            matrices |= {f"mlp.{each}_proj": (self.inner, self.hidden) for each in ("gate", "up")}
        norms = {"input_layernorm": self.hidden, "post_attention_layernorm": self.hidden}
        if self.is_gemma:
            norms |= {"pre_feedforward_layernorm": self.hidden, "post_feedforward_layernorm": self.hidden}
        if self.head_norms:
            norms |= {"self_attn.q_norm": self.size, "self_attn.k_norm": self.size}
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, self.hidden)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            shapes |= {f"{at}.{name}.weight": shape for name, shape in matrices.items()}
            shapes |= {f"{at}.{name}.weight": (size,) for name, size in norms.items()}
            shapes |= {f"{at}.{name}.bias": shape[:1] for name, shape in matrices.items() if name in self.biases}
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.given.get("tie_word_embeddings", True):
            shapes["lm_head.weight"] = (VOCABULARY, self.hidden)
        random = np.random.default_rng(5)

        def made(shape: tuple[int, ...], name: str) -> NDArray[Any]:
            if len(shape) == 2:
                return random.standard_normal(shape) * 1.5 / np.sqrt(shape[1]) + 0.01
            return random.normal(0, 0.5, shape) if name.endswith("bias") else random.uniform(0.5, 1.5, shape) - self.is_gemma

        return {name: stored(made(shape, name), self.dtype) for name, shape in shapes.items()}

    def write(self, folder: Path, shards: int = 1) -> Path:
        """Write settings and weights, with more than one of the `shards` with an index."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.settings))
        tensors = self.tensors()
        names = [*tensors]
        if shards == 1:
            write_safetensors(folder / "model.safetensors", tensors, self.dtype)
            return folder
        places = {
            name: f"model-{1 + at * shards // len(names):05d}-of-{shards:05d}.safetensors" for at, name in enumerate(names)
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
        for place in set(places.values()):
            write_safetensors(folder / place, {name: tensors[name] for name in names if places[name] == place}, self.dtype)
        return folder


def write_safetensors(path: Path, tensors: Mapping[str, NDArray[Any]], dtype: str) -> None:
    """Write a file by its format: the length of a header, the header, the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in tensors.items():
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [end, end := end + array.nbytes]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in tensors.values()))


_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

FOLDERS = {
    "llama 3": SmallFolder(
        "llama", "BF16", given={"rope_theta": 5e5, "rope_scaling": _LLAMA3, "tie_word_embeddings": True, "hidden_act": "silu"}
    ),
    "llama biases": SmallFolder(
        "llama", "F32",
        given={
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, "attention_bias": True,
            "mlp_bias": True, "tie_word_embeddings": False,
        },
        biases=tuple(f"{part}_proj" for part in (
            "self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"
        )),
    ),
    "mistral": SmallFolder(
        "mistral", "F16", size=32, given={"sliding_window": 21, "rope_theta": 1e6, "tie_word_embeddings": False}
    ),
    "qwen2": SmallFolder(
        "qwen2", "F16",
        given={
            "rope_theta": 1e6, "use_sliding_window": False, "sliding_window": 5, "max_window_layers": 2,
            "tie_word_embeddings": False,
        },
        biases=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ),
    "qwen3": SmallFolder(
        "qwen3", "BF16", size=32, head_norms=True,
        given={"rope_theta": 1e6, "attention_bias": False, "tie_word_embeddings": True, "layer_types": ["full_attention"] * 2},
    ),
    "phi3": SmallFolder(
        "phi3", "F32", key_heads=4, fused=True,
        given={
            "sliding_window": 30, "rope_scaling": None, "original_max_position_embeddings": 256, "tie_word_embeddings": False
        },
    ),
    "gemma2": SmallFolder(
        "gemma2", "BF16", layers=3,
        given={
            "sliding_window": 11, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
            "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "cache_implementation": "hybrid",
        },
    ),
    "gemma3": SmallFolder(
        "gemma3_text", "F16", layers=7, key_heads=1, head_norms=True,
        given={
            "sliding_window": 11, "sliding_window_pattern": 6, "query_pre_attn_scalar": 16, "rope_theta": 1e6,
            "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "final_logit_softcapping": None, "attn_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh",
            "use_bidirectional_attention": False,
        },
    ),
    "gemma3 by layers": SmallFolder(
        "gemma3_text", "BF16", layers=3, key_heads=1, head_norms=True,
        given={
            "sliding_window": 9, "query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 2e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
            },
        },
    ),
}  # fmt: skip
"""As transformers 4 and 5 write them."""


def main() -> None:
    """Write what transformers computes to the file that is named."""
    import torch
    from transformers import AutoModelForCausalLM

    made: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, small in FOLDERS.items():
            path = small.write(Path(folder) / name, shards=2)
            model, about = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
            assert not about["missing_keys"] and not about["unexpected_keys"], about
            with torch.no_grad():
                logits = model.eval()(torch.tensor([TOKENS])).logits[0]
            made[name] = [[round(float(each), 5) for each in logits[at - 1, :SHOWN]] for at in AT]
            print(name, type(model).__name__, model.config)
    Path(sys.argv[1]).write_text(json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
