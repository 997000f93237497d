"""Imitated miscompilations of kernels of all families, on a device: how many of them the check finds.

    python -m tests.runtime.checking.imitations --device pocl [--count 40] [--seed 0]

Each changes a kernel's text at one drawn place (`tests.support.miscompiled`), and the driver compiles that. Only changes with
an effect count: the changed kernel writes other bits than the right one, of drawn memory, or ends the process. The right
kernels are checked too, and must be found right.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.stages.pipeline import generate
from flashmem.runtime.checking.trial import Trial
from flashmem.runtime.kernels.children import Child
from flashmem.runtime.kernels.required import required_kernels
from flashmem.runtime.kernels.trials import distinct_trials
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.discovery import find_device
from flashmem.target.descriptor import load_descriptor
from tests.golden.models import MODELS
from tests.support.miscompiled import changes

NAMES = (
    "gptneo-tiny-dynamic-quantised",
    "whisper-tiny-decoder",
    "sam2-narrow",
    "sd-tiny-unet",
    "resnet-tiny-qoperator",
    "smollm2-layers",
)
_LONGEST = 120.0
_WORKER = "tests.runtime.checking.imitating_worker"
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Imitation:
    """A kernel, what its miscompilation is called, and the text that the driver compiles."""

    trial: Trial
    options: tuple[str, ...]
    kind: str
    text: str

    @property
    def family(self) -> str:
        """The template of the kernel."""
        return self.trial.name.rsplit("_", 1)[0]


def trials(descriptor: str = "generic-gpu") -> list[tuple[Trial, tuple[str, ...]]]:
    """One launch of each kernel of a few models, with its build options."""
    found: dict[str, tuple[Trial, tuple[str, ...]]] = {}
    for name in NAMES:
        with tempfile.TemporaryDirectory() as folder:
            graph = MODELS[name].graph(Path(folder))
            made = generate(fuse(graph), load_descriptor(descriptor))
        plain, _ = required_kernels(made.program, made.source, {}, {})
        for trial in (trial for kernel in plain for trial in distinct_trials(kernel, made.program, {})):
            if sum(each.nbytes for each in trial.arguments) < _MOST_BYTES:
                found.setdefault(trial.name, (trial, made.program.build_options))
    return list(found.values())


def drawn(known: list[tuple[Trial, tuple[str, ...]]], seed: int) -> Iterator[Imitation]:
    """Imitations of one family after the other, each of another kind where possible."""
    generator = random.Random(seed)
    families: dict[str, list[Imitation]] = defaultdict(list)
    for trial, options in known:
        for kind, text in changes(trial.text, generator.randrange(1 << 30)):
            made = Imitation(trial, options, kind, text)
            families[made.family].append(made)
    used: dict[str, int] = defaultdict(int)
    for each in families.values():
        generator.shuffle(each)
    for row in zip_longest(*(families[name] for name in sorted(families))):
        for made in row:
            if made is not None:
                used[made.kind] += 1
                yield made


class Imitator:
    """A child that checks imitations, started again after one has ended it."""

    def __init__(self, device: Device, folder: Path) -> None:
        self._device, self._folder = device, folder
        self._child: Child | None = None

    def ask(self, made: Imitation) -> tuple[bool, str]:
        """Whether the change has an effect, and what the check says of it ("": nothing)."""
        self._child = self._child or Child(_WORKER, self._device, self._folder, self._folder / "errors.txt")
        job = {"trial": made.trial.to_json(), "options": list(made.options), "text": made.text}
        try:
            answer = self._child.ask(job, _LONGEST)
        except TimeoutError:
            answer = None
        if answer is None:
            self.close()
            return True, "the process ended"
        return bool(answer["effect"]), str(answer["wrong"])

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.close()
            self._child = None


def main() -> None:
    """Print a line for each imitation and a summary; exit with 1 if over one in forty is missed, or a right kernel is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--descriptor", default="generic-gpu", help="for which kernels are written")
    given = parser.parse_args()
    device = find_device(given.device)
    print(f"{device.name}, {device.platform}, driver {device.key.splitlines()[-1]}")
    known = trials(given.descriptor)
    right = missed = count = alarms = 0
    with tempfile.TemporaryDirectory() as folder:
        imitator = Imitator(device, Path(folder))
        for trial, options in known:
            _, wrong = imitator.ask(Imitation(trial, options, "none", trial.text))
            right += not wrong
            alarms += bool(wrong)
            if wrong:
                print(f"FALSE ALARM {wrong}")
        for made in drawn(known, given.seed):
            if count == given.count:
                break
            effect, wrong = imitator.ask(made)
            if effect:
                count += 1
                missed += not wrong
                print(
                    f"{'found ' if wrong else 'MISSED'} {made.kind:32} {made.trial.name:28} {wrong.partition(': ')[2][:90]}",
                    flush=True,
                )
        imitator.close()
    print(f"{count - missed} of {count} miscompilations found; {alarms} false alarms in {right + alarms} right kernels")
    sys.exit(missed > count // 40 or alarms > 0)


if __name__ == "__main__":
    main()
