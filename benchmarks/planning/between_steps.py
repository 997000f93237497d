"""The share of streamed bytes that kernels copy between their steps, in mode `interleave`.

    python -m benchmarks.planning.between_steps [MODEL ...] --device adreno750 [--precision fp16]

A launch's first move goes between the steps of its work, as far as these reach (FlashMem, section 4.4); the rest goes after the
work, or by a launch that only copies. Steps are counted as `profiler.phone_compilers.pipeline` counts them. Models are planned;
nothing runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.command import Arguments, run_command
from flashmem.compiler.adaptive.plan_graph import plan_graph
from flashmem.compiler.passes.pipeline import prepare
from flashmem.options import resolve
from flashmem.planning.capacity.features import launch_features
from flashmem.profiler.phone_compilers.interleaved import step_bytes
from flashmem.profiler.phone_compilers.pipeline import steps, stream_places
from flashmem.program.kernel_text import kernel_texts
from flashmem.program.lanes import lane_kind
from flashmem.request.request import BundleRequest
from flashmem.runtime.streaming.interleaved import layer_moves
from flashmem.tools.zoo.graphs import zoo_graph

MODELS = (
    "gptneo-125m", "gptneo-1.3b", "gpt2", "resnet50", "mobilenetv2", "vit-b16", "vit-103m", "deepvit-204m",
    "whisper-tiny-encoder", "whisper-medium-encoder", "opt-125m",
)  # fmt: skip


@dataclass
class Streamed:
    """Bytes of a first run that are streamed, and where they are copied."""

    between: int = 0
    after: int = 0
    apart: int = 0

    def row(self, name: str) -> str:
        """A row of the table."""
        total = max(1, self.between + self.after + self.apart)
        shares = " | ".join(f"{100 * each / total:.0f} %" for each in (self.between, self.after, self.apart))
        return f"| {name} | {total / 1e6:.1f} | {shares} |"


def streamed(name: str, device: str, precision: str) -> Streamed:
    """Plan the architecture `name` for `device`, and count."""
    options = resolve(BundleRequest(device=device, mode="interleave", precision=precision, unfusion=False))
    generated, plan = plan_graph(prepare(zoo_graph(name)), options)
    program = generated.program
    texts = kernel_texts(generated.source.lane)
    slices = {each.name: each for each in program.slices}
    found = Streamed()
    for layer, moves in layer_moves(plan, slices, lane_kind(program)).items():
        launch = program.launches[layer - 1]
        features = launch_features(launch, 0, program.memory_path)
        text = texts[launch.kernel]
        reached = 0
        if (own := moves.interleaved) is not None:
            first = max(move.nbytes for move in own.moves if move.kind == own.kind)
            reached = min(first, int(steps(*stream_places(text), features) * step_bytes(text) * features.items))
            found.after += sum(move.nbytes for move in own.moves) - reached
        found.between += reached
        found.apart += sum(move.nbytes for each in (*moves.leading, *moves.separate) for move in each.moves)
    return found


def main() -> None:
    """Print a table."""
    parser = Arguments(__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--device", default="adreno750")
    parser.add_argument("--precision", default="fp32")
    given = parser.parse_args()
    print("| model | streamed MB | between steps | after the work | by copies alone |\n|---|---|---|---|---|")
    for name in given.models:
        print(streamed(name, given.device, given.precision).row(name), flush=True)


if __name__ == "__main__":
    run_command(main)
