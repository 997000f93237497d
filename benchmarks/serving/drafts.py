"""Time for each token with and without drafts of repeated text (prompt lookup).

    python -m benchmarks.serving.drafts model.gguf --device pocl --budget 60MB

Both take turns in one session; times are medians of several rounds, for tokens after the first.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

import flashmem
from benchmarks.command import Arguments, run_command
from flashmem.runtime.generation.generated_text import GenerationReport

TEXT = (
    "The city of Kyoto was the capital of Japan for more than a thousand years. Its temples, gardens and wooden houses draw "
    "millions of visitors each year. The Golden Pavilion, a temple covered in gold leaf, stands beside a quiet pond in the "
    "north of the city."
)
CODE = """def area(width, height):
    return width * height


def volume(width, height, depth):
    return width * height * depth
"""
PROMPTS = {
    "copy": f"Repeat this text word for word: {TEXT}",
    "summary": f"Summarise this text in two sentences: {TEXT}",
    "code": f"Add a docstring to each function of this Python code:\n{CODE}",
    "question": "Why is the sky blue?",
    "story": "Tell me a short story about a dog and a boat.",
}


def main() -> None:
    """Compile, then generate each answer with and without drafts."""
    parser = Arguments(__doc__)
    parser.add_language_model()
    parser.add_argument("--budget", help="of flashmem, for instance 60MB")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    parser.check_device(args.device)
    if not args.model.is_file():
        parser.error(f"{args.model}: no such file; name a language model in a .gguf file")
    with tempfile.TemporaryDirectory() as folder:
        given = {"device": args.device, "budget": args.budget, "max_length": 512}
        bundle = flashmem.compile(args.model, Path(folder) / "m.flashmem", **given)
        with flashmem.Generator(bundle, device=args.device) as generator:
            for name, prompt in PROMPTS.items():
                reports: dict[bool, list[GenerationReport]] = {False: [], True: []}
                texts = set()
                for number in range(2 * args.rounds):
                    speculate = number % 2 == 1
                    pieces = generator.generate(
                        [{"role": "user", "content": prompt}], max_new_tokens=args.tokens, speculate=speculate
                    )
                    texts.add("".join(pieces))
                    assert generator.last is not None
                    reports[speculate].append(generator.last)
                before, after = (1e3 * median(each.token_seconds for each in reports[kind]) for kind in (False, True))
                last = reports[True][-1]
                print(
                    f"{name}: {before:.1f} ms a token, with drafts {after:.1f} ({before / after:.2f} times as fast), "
                    f"{last.accepted} of {last.drafted} drafted tokens right in {last.tokens}, "
                    f"{reports[False][-1].token_bytes / 1e6:.1f} and {last.token_bytes / 1e6:.1f} MB loaded for each; "
                    f"{len(texts)} different text{'s' * (len(texts) > 1)}",
                    flush=True,
                )


if __name__ == "__main__":
    run_command(main)
