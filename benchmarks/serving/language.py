"""A trained language model beside ONNX Runtime: the same tokens, and milliseconds for each.

    python -m benchmarks.serving.language model.gguf --device intel-cpu [--budget 60MB] [--kv int8] [--tokens 64] [--prompts 8]

Both engines run the ONNX model of the file (`flashmem.compiler.frontend.decoder`) and take the likeliest token each time. ONNX
Runtime has the weights that the package gguf dequantises, in float32, the cache in arrays, and no limit on memory. Where its
two best logits are nearer than 1e-3 of their range, a prompt ends. It prints for each prompt the equal tokens, and for both
engines the seconds to the first token and the median milliseconds of a later one; for flashmem the bytes that are loaded for
each token, and the peak of the memory that the budget counts. Exit code 1: a token differs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import onnxruntime

import flashmem
from benchmarks.command import Arguments, run_command
from flashmem.compiler.frontend.decoder.weights import dequantised
from flashmem.compiler.frontend.decoder_files import converted

PROMPTS = (
    "What is the capital of Japan?",
    "Write a short poem about the sea.",
    "Explain photosynthesis to a child.",
    "List three uses of a paper clip.",
    "Who wrote Hamlet?",
    "What is 12 plus 30?",
    "Summarise: Cats are small animals that people keep at home. They like to sleep, and they hunt mice.",
    "Translate to French: good morning.",
)

MARGIN = 1e-3
"""Of the range of the logits: two tokens this near may change places by rounding."""

MAX_LENGTH = 512


class Reference:
    """ONNX Runtime with the cache in arrays."""

    def __init__(self, path: Path) -> None:
        self._session = onnxruntime.InferenceSession(path)
        inputs = self._session.get_inputs()
        self._empty = {each.name: np.zeros(each.shape, np.float32) for each in inputs if each.name.startswith("past")}

    def greedy(self, tokens: list[int], count: int, ends: frozenset[int]) -> tuple[list[int], bool, float, list[float]]:
        """The likeliest tokens; whether the next one is too near to the second; seconds to the first, and of later ones."""
        cache, found, total, begun = dict(self._empty), list[int](), 0, perf_counter()
        read, seconds, first = tokens, list[float](), 0.0
        while True:
            since = perf_counter()
            total += len(read)
            given = {"input_ids": np.array([read]), "total_sequence_length": np.array(total, np.int32)}
            logits, *present = self._session.run(None, {**given, **cache})
            cache = dict(zip(cache, present, strict=True))
            scores = logits[0, -1]
            second, best = np.argsort(scores)[-2:]
            if found:
                seconds.append(perf_counter() - since)
            else:
                first = perf_counter() - begun
            if best in ends or len(found) == count:
                return found, False, first, seconds
            if scores[best] - scores[second] < MARGIN * np.ptp(scores):
                return found, True, first, seconds
            found.append(int(best))
            read = [int(best)]


def main() -> None:
    """Compile, generate with both, compare."""
    parser = Arguments(__doc__)
    parser.add_language_model()
    parser.add_argument("--budget", help="of flashmem, for instance 60MB")
    parser.add_argument("--kv", choices=("fp32", "fp16", "int8"), help="stored type of the cache; fp16 without it")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    args = parser.parse_args()
    parser.check_device(args.device)
    if not args.model.is_file():
        parser.error(f"{args.model}: no such file; name a language model in a .gguf file")
    wrong, ours, theirs, firsts = 0, list[float](), list[float](), list[tuple[float, float]]()
    with tempfile.TemporaryDirectory() as folder, converted(args.model, MAX_LENGTH, dequantised) as source:
        reference = Reference(source.path)
        given = {"device": args.device, "budget": args.budget, "max_length": MAX_LENGTH, "state_precision": args.kv}
        bundle = flashmem.compile(args.model, Path(folder) / "m.flashmem", **given)
        with flashmem.Generator(bundle, device=args.device) as generator:
            for prompt in PROMPTS[: args.prompts]:
                tokens = generator.tokens_of([{"role": "user", "content": prompt}])
                wanted, near, first, seconds = reference.greedy(tokens, args.tokens, generator.language.ends)
                if not wanted:
                    print(f"the first two tokens are too near: {prompt}", flush=True)
                    continue
                text = "".join(generator.generate(tokens, max_new_tokens=len(wanted)))
                report = generator.last
                assert report is not None
                equal = text == generator.tokenizer.decode(wanted).decode(errors="replace")
                wrong += not equal
                theirs += seconds
                ours.append(report.token_seconds)
                firsts.append((report.first_seconds, first))
                ended = ", then two were too near" if near else ""
                print(f"{len(wanted)} tokens {'equal' if equal else 'DIFFER'}{ended}: {prompt} {text!r}", flush=True)
    mine, other = (median(times) for times in zip(*firsts, strict=True))
    print(f"flashmem: first token after {mine:.2f} s, {1e3 * median(ours):.1f} ms each", end="")
    print(f", {report.token_bytes / 1e6:.1f} MB loaded for each, {report.peak_bytes / 1e6:.1f} MB at most")
    print(f"ONNX Runtime: first token after {other:.2f} s, {1e3 * median(theirs):.1f} ms each")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    run_command(main)
