"""Train the boosters of a GPU family of phones on compiled code: FAMILY.seconds.ubj and FAMILY.slowdown.ubj.

    python -m flashmem.profiler.phone_compilers.boosters adreno7xx -o devices

Compiles the family's kernels, writes FAMILY.kernels.csv.gz, and trains. The compiler's output stays in the user's cache: an
interrupted command continues. `--train` uses an existing FAMILY.kernels.csv.gz, and needs no compiler. No phone is measured.
"""

from __future__ import annotations

import argparse
import time
from datetime import UTC, datetime
from pathlib import Path

from flashmem.base.errors import UserError
from flashmem.base.streams import exit_codes
from flashmem.planning.capacity.hardware import Hardware
from flashmem.profiler.phone_compilers.compiled_dataset import SUFFIX, KernelRow, collect, read_rows, texts_of, write_rows
from flashmem.profiler.phone_compilers.families import FAMILIES, Family
from flashmem.profiler.phone_compilers.pairs import pairs
from flashmem.profiler.phone_compilers.report import examine
from flashmem.profiler.phone_compilers.results import StoredResults, results_folder
from flashmem.profiler.phone_compilers.training import save, train
from flashmem.target.descriptor import load_descriptor


def gpus_of(family: Family) -> dict[str, Hardware]:
    """The facts of the shipped devices of a family."""
    return {name: Hardware.of(load_descriptor(name)) for name in family.devices}


def train_family(family: Family, rows: list[KernelRow], about: dict[str, object], stem: Path) -> int:
    """Train on all pairs of `rows`, write both models, and return the number of pairs."""
    found = list(pairs(rows, gpus_of(family)))
    source = (
        f"the model of {family.name} trained on compiled code, no phone measured ({len(found)} pairs of {texts_of(rows)} "
        f"kernels, Mesa {about['mesa']} for {about['gpu']})"
    )
    save(train(found, source), stem)
    return len(found)


def main() -> None:
    """Collect and train, and print what was made."""
    parser = argparse.ArgumentParser(prog="python -m flashmem.profiler.phone_compilers.boosters", description=__doc__)
    parser.add_argument("family", choices=FAMILIES, help="the GPU family")
    parser.add_argument("-o", "--output", type=Path, default=Path("devices"), metavar="DIR", help="the descriptors' folder")
    parser.add_argument("--train", action="store_true", help="train on the dataset that is there, without a compiler")
    parser.add_argument("-j", "--jobs", type=int, default=0, help="compilers at a time; as many as processors by default")
    given = parser.parse_args()
    if not given.output.is_dir():
        raise UserError(f"--output {given.output} is not a folder; name one")
    family, path = FAMILIES[given.family], given.output / f"{given.family}{SUFFIX}"
    started = time.monotonic()
    if not given.train:
        stored = StoredResults(results_folder())
        about, rows = collect(family, lambda texts: examine(texts, family.compiler, given.jobs, stored))
        write_rows(path, {**about, "date": datetime.now(UTC).date().isoformat()}, rows)
        print(f"{path}: {len(rows)} launches of {texts_of(rows)} texts, {about['failed']} did not build", flush=True)
    about, rows = read_rows(path)
    count = train_family(family, rows, about, given.output / family.name)
    print(f"{given.output / family.name}: trained on {count} pairs in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    with exit_codes():
        main()
