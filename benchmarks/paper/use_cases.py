"""CARIn's four use cases with models that are here, solved for phones by simulation.

    python -m benchmarks.paper.use_cases [UC1 UC2 UC3 UC4] [--zoo DIR] [--gpus adreno750 mali-g710] [--write DIR]

Objectives and constraints are those of CARIn's section 6.2. Its models and data sets are not here, so the models are others:

- UC1, images, each within 41.67 ms: ResNet-50 and ViT-B/16 of the zoo, with the accuracy of torchvision's weights;
- UC2, text, at most 90 MB: MiniLM with 8-bit weights, in single and half precision; one model, so accuracy is no objective;
- UC3, images and sound at a time, 100 ms on average, at most 10 ms of deviation: the models of UC1, and Basic Pitch;
- UC4, three models at a time, each within 10 ms: PP-OCR's classifier, Magika and Silero VAD, one model for each task.

Each phone is a GPU's descriptor and the CPU `generic-cpu`. RASS must agree with the exhaustive search of
`benchmarks.serving.design`; printed are the designs, the policy, and optimality over that of simpler methods. Simulated answers
do not vary, so a deviation is 0. `--write` keeps the applications as UCn-GPU.toml, for `flashmem design FILE`, which measures
on devices that are here. UC1 and UC3 need `--zoo`, the others the wheels of `examples/models.txt`. No device is needed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.command import Arguments, run_command
from benchmarks.serving.design import compared, tables
from benchmarks.serving.design_plots import written
from examples import file_type, notes, similar_sentences, speech_or_not, text_direction
from examples.trained import Trained
from flashmem.base.errors import UserError
from flashmem.target.descriptor import descriptor_names
from flashmem.tools.design.application import read_application
from flashmem.tools.design.profiles import Profiling, candidates
from flashmem.tools.design.writer import solved

IMAGES: Mapping[str, float] = {"resnet50": 0.7613, "vit-b16": 0.8107}
"""Models of the zoo, with the top-1 accuracy of torchvision's first weights."""


@dataclass(frozen=True)
class UseCase:
    """An application: its tasks, budgets (none: no limit), and the rest of `app.toml`.

    A task's network is a trained one, or None for `IMAGES`.
    """

    tasks: Mapping[str, Trained | None]
    budgets: Sequence[str]
    goals: str
    bounds: str

    @property
    def needs_zoo(self) -> bool:
        """Whether a task has models of the zoo."""
        return None in self.tasks.values()

    def text(self, devices: Sequence[str], zoo: Mapping[str, Path]) -> str:
        """The application as `app.toml`. Raises FileNotFoundError: a wheel of `examples/models.txt` is missing."""
        lines = [f"budgets = {json.dumps(list(self.budgets))}"] if self.budgets else []
        lines += [f'[[device]]\nname = "{name}"' for name in devices]
        for task, network in self.tasks.items():
            lines.append(f'[[task]]\nname = "{task}"')
            if network is None:
                for name, path in zoo.items():
                    lines += _model(path, f"accuracy = {IMAGES[name]}")
            else:
                shapes = ", ".join(f"{json.dumps(name)} = {list(shape)}" for name, shape in network.shapes.items())
                lines += _model(network.path(), f"shape = {{ {shapes} }}")
        return "\n".join([*lines, self.goals.strip(), self.bounds.strip(), ""])


def _model(path: Path, more: str) -> list[str]:
    return [f'[[task.model]]\npath = {json.dumps(str(path.resolve()))}\nprecision = ["fp32", "fp16"]', more]


def _each(kind: str, *pairs: str) -> str:
    """One table of `kind` for each text of keys and values."""
    return "\n".join(f"[[{kind}]]\n{pair}" for pair in pairs)


LATENCY, DEVIATION = 'minimise = "latency"', 'minimise = "latency"\nstatistic = "deviation"'

USE_CASES: Mapping[str, UseCase] = {
    "UC1": UseCase(
        {"see": None},
        ("90MB", "300MB"),
        _each("objective", 'maximise = "accuracy"', 'maximise = "throughput"'),
        _each("constraint", 'metric = "latency"\nstatistic = "maximum"\nat_most = "41.67ms"'),
    ),
    "UC2": UseCase(
        {"read": similar_sentences.NETWORK},
        ("4MB", "90MB"),
        _each("objective", LATENCY, 'minimise = "size"'),
        _each("constraint", 'metric = "memory"\nat_most = "90MB"'),
    ),
    "UC3": UseCase(
        {"see": None, "hear": notes.NETWORK},
        ("90MB", "300MB"),
        _each("objective", LATENCY, DEVIATION, 'maximise = "accuracy"\ntask = "see"'),
        _each(
            "constraint",
            'metric = "latency"\nat_most = "100ms"',
            'metric = "latency"\nstatistic = "deviation"\nat_most = "10ms"',
        ),
    ),
    "UC4": UseCase(
        {"turn": text_direction.NETWORK, "kind": file_type.NETWORK, "voice": speech_or_not.NETWORK},
        (),
        _each("objective", LATENCY, DEVIATION, 'minimise = "size"', 'minimise = "memory"'),
        _each("constraint", 'metric = "latency"\nstatistic = "maximum"\nat_most = "10ms"'),
    ),
}


def solve(file: Path) -> None:
    """Simulate the candidates of the application `file`, solve it, and print the answer."""
    asked = read_application(file)
    found = list(candidates(asked, Profiling(simulated=True), lambda text: print(text, file=sys.stderr, flush=True)))
    answer = solved(asked, found)
    result = compared(answer, found)
    print(
        f"{result['decisions']} decisions, of which {result['allowed']} keep all constraints; the exhaustive search agrees.\n"
    )
    print(f"{tables(answer)}\n")
    for row in result["ratios"]:
        ratios = ", ".join(f"{way} {written(ratio)}" for way, ratio in row["ratio"].items())
        print(f"on {row['processors']}, optimality over that of others: {ratios}")


def main() -> None:
    """Write and solve each use case for each phone."""
    parser = Arguments(__doc__)
    parser.add_zoo(required=False)
    parser.add_argument("cases", nargs="*", metavar="UC", help="use cases (all; without --zoo, those that need none)")
    parser.add_argument("--gpus", nargs="+", default=["adreno750", "mali-g710"], choices=descriptor_names(), metavar="NAME")
    parser.add_argument("--write", type=Path, metavar="DIR", help="keep the applications")
    args = parser.parse_args()
    chosen = args.cases or [name for name, case in USE_CASES.items() if args.zoo is not None or not case.needs_zoo]
    if unknown := [name for name in chosen if name not in USE_CASES]:
        parser.error(f"no use case {unknown[0]!r}: choose from {', '.join(USE_CASES)}")
    if args.zoo is None and any(USE_CASES[name].needs_zoo for name in chosen):
        parser.error(f"this needs --zoo DIR with {' or '.join(IMAGES)}, or other use cases")
    zoo = {} if args.zoo is None else parser.models_in(args.zoo, list(IMAGES))
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.write or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for name in chosen:
            for gpu in args.gpus:
                print(f"\n## {name}, {gpu} and generic-cpu (simulated)\n")
                file = folder / f"{name}-{gpu}.toml"
                try:
                    file.write_text(USE_CASES[name].text([gpu, "generic-cpu"], zoo), encoding="utf-8")
                    solve(file)
                except FileNotFoundError as error:
                    parser.error(str(error))
                except UserError as error:  # for instance, no decision keeps all constraints
                    print(error)


if __name__ == "__main__":
    run_command(main)
