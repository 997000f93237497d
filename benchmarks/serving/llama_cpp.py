"""A language model within a hard limit on memory, beside llama.cpp: milliseconds of a token.

    npm install --ignore-scripts node-llama-cpp
    python -m benchmarks.serving.llama_cpp model.gguf --budget 350MB --limit 600MB --node node_modules [--device pocl] [--shape]

Both run the same file greedily, llama.cpp (the CPU build of node-llama-cpp) on as many threads as there are processors, in
fresh processes that take turns, inside a memory cgroup of `--limit` (which needs root) and without one. The file and the
bundle are dropped from the page cache before each. It prints the median of a later token in each process, and the median of
these; for flashmem also the bytes loaded for a token. A model with random weights serves as well: `--shape` writes one as
large as TinyLlama-1.1B, in Q4_1, with the vocabulary of `model.gguf`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import flashmem
from benchmarks.command import Arguments, run_command
from benchmarks.memory_cgroup import HardLimit, why_no_limit
from benchmarks.worker import drop
from flashmem.base.units import format_size, parse_size

_QUESTION = "Write a short poem about the sea."

_FLASHMEM = """
import json, sys
import flashmem
bundle, device, count, question = sys.argv[1:]
with flashmem.Generator(bundle, device=device) as generator:
    tokens = generator.tokens_of([{"role": "user", "content": question}])
    for _ in generator.generate(tokens, max_new_tokens=int(count)):
        pass
    report = generator.last
print(json.dumps([report.token_seconds, report.token_bytes, report.peak_bytes]))
"""

_LLAMA_CPP = """
import {getLlama} from "node-llama-cpp";
const [path, threads, count] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: "never", logLevel: "error"});
const model = await llama.loadModel({modelPath: path});
const context = await model.createContext({contextSize: 512, threads: +threads});
const tokens = model.tokenize(process.argv[5], true), seconds = [];
let last = performance.now();
for await (const token of context.getSequence().evaluate(tokens, {temperature: 0})) {
    const now = performance.now();
    seconds.push((now - last) / 1000);
    last = now;
    if (seconds.length > +count) break;
}
const later = seconds.slice(1).sort((a, b) => a - b);
console.log(JSON.stringify([later[later.length >> 1], 0, 0]));
process.exit(0);
"""

_PROMPT = f"<|im_start|>user\n{_QUESTION}<|im_end|>\n<|im_start|>assistant\n"
"""The question in the template of SmolLM2, whose vocabulary both read."""

_LAYERS, _HIDDEN, _HEADS, _KEY_HEADS, _INNER = 22, 2048, 32, 4, 5632


def write_shape(path: Path, vocabulary: Path) -> None:
    """Write a model of TinyLlama-1.1B's shape with random weights in Q4_1, and the tokenizer of `vocabulary`."""
    import gguf

    fields = gguf.GGUFReader(vocabulary).fields
    writer, random = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_block_count(_LAYERS)
    writer.add_context_length(2048)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KEY_HEADS)
    writer.add_rope_dimension_count(_HIDDEN // _HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = fields["tokenizer.ggml.tokens"].contents()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([int(each) for each in fields["tokenizer.ggml.token_type"].contents()])
    writer.add_token_merges(fields["tokenizer.ggml.merges"].contents())
    writer.add_eos_token_id(int(fields["tokenizer.ggml.eos_token_id"].contents()))
    writer.add_chat_template(fields["tokenizer.chat_template"].contents())

    def matrix(name: str, rows: int, depth: int) -> None:
        blocks = np.empty((rows, depth // 32, 20), np.uint8)
        scale = (random.uniform(0.8, 1.2, (rows, depth // 32, 1)) / (4.6 * np.sqrt(depth))).astype("<f2")
        blocks[..., :2], blocks[..., 2:4] = scale.view(np.uint8), (-7.5 * scale).astype("<f2").view(np.uint8)
        blocks[..., 4:] = random.integers(0, 256, (rows, depth // 32, 16), np.uint8)
        writer.add_tensor(f"{name}.weight", blocks.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType.Q4_1)

    keys = _HIDDEN // _HEADS * _KEY_HEADS
    sizes = {
        "attn_q": (_HIDDEN, _HIDDEN),
        "attn_k": (keys, _HIDDEN),
        "attn_v": (keys, _HIDDEN),
        "attn_output": (_HIDDEN, _HIDDEN),
    }
    sizes |= {"ffn_gate": (_INNER, _HIDDEN), "ffn_up": (_INNER, _HIDDEN), "ffn_down": (_HIDDEN, _INNER)}
    matrix("token_embd", len(tokens), _HIDDEN)
    matrix("output", len(tokens), _HIDDEN)
    writer.add_tensor("output_norm.weight", np.ones(_HIDDEN, np.float32))
    for layer in range(_LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(_HIDDEN, np.float32))
        for name, size in sizes.items():
            matrix(f"blk.{layer}.{name}", *size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _measured(command: list[str], limit: int | None, dropped: list[Path]) -> list[float] | str:
    """Seconds of a token, bytes loaded for it and the peak, of one process; how it ended, if it failed."""
    drop(dropped)
    with nullcontext() if limit is None else HardLimit(limit) as group:
        run = _run if group is None else group.run
        done = run(command)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return "killed" if done.returncode < 0 or done.returncode == 137 else f"failed: {last}"
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Compile, and let both generate in turn."""
    parser = Arguments(__doc__)
    parser.add_language_model()
    parser.add_argument("--budget", default="350MB", help="of flashmem")
    parser.add_argument("--limit", default="600MB", help="of each process")
    parser.add_argument("--node", type=Path, default=Path("node_modules"), help="the folder with node-llama-cpp")
    parser.add_argument("--shape", action="store_true", help="a model as large as TinyLlama-1.1B")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    parser.check_device(args.device)
    if not args.model.is_file():
        parser.error(f"{args.model}: no such file; name a language model in a .gguf file")
    if not (args.node / "node-llama-cpp").is_dir():
        parser.error(
            f"{args.node} has no node-llama-cpp; npm install --ignore-scripts node-llama-cpp, and name its folder with --node"
        )
    reason = why_no_limit()
    if reason is not None:
        print(f"no hard limit here: {reason}")
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), args.model
        if args.shape:
            model = folder / "shape.gguf"
            write_shape(model, args.model)
        script = folder / "llama.mjs"
        script.write_text(_LLAMA_CPP)
        (folder / "node_modules").symlink_to(args.node.resolve())
        given: Any = {"device": args.device, "budget": args.budget, "max_length": 512}
        bundle = flashmem.compile(model, folder / "m.flashmem", **given)
        sides = {
            "flashmem": [sys.executable, "-c", _FLASHMEM, str(bundle.path), args.device, str(args.tokens), _QUESTION],
            "llama.cpp": ["node", str(script), str(model), str(os.cpu_count()), str(args.tokens), _PROMPT],
        }
        files = [model, *(each for each in bundle.path.rglob("*") if each.is_file())]
        for limit in [None, *([] if reason else [parse_size(args.limit, what="limit")])]:
            found: dict[str, list[list[float] | str]] = {side: [] for side in sides}
            for _ in range(args.runs):
                for side, command in sides.items():
                    found[side].append(_measured(command, limit, files))
            print("no limit" if limit is None else f"limit {format_size(limit)}", flush=True)
            for side, rows in found.items():
                numbers = [row for row in rows if not isinstance(row, str)]
                others = [row for row in rows if isinstance(row, str)]
                times = ", ".join(f"{1e3 * row[0]:.0f}" for row in numbers)
                middle = f"{1e3 * median(row[0] for row in numbers):.1f} ms a token ({times})" if numbers else ""
                loaded = f", {format_size(int(numbers[-1][1]))} loaded for each" if numbers and numbers[-1][1] else ""
                print(f"  {side}: {middle}{loaded}{' '.join(others)}", flush=True)


if __name__ == "__main__":
    run_command(main)
