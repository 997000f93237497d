"""`python -m flashmem.profiler.phone_compilers GPU BUNDLE`: statistics of a bundle's kernels from a phone's open compiler."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from flashmem.base.errors import UserError
from flashmem.base.streams import exit_codes
from flashmem.profiler.phone_compilers.gpus import GPUS, gpu_of
from flashmem.profiler.phone_compilers.report import examine, texts_of


def main() -> int:
    """Parse the command line, and print a table or JSON; 1 if a kernel does not compile."""
    parser = argparse.ArgumentParser(prog="python -m flashmem.profiler.phone_compilers", description=__doc__)
    parser.add_argument("gpu", help=f"one of {', '.join(GPUS)}, or the device descriptor of a GPU with such a core")
    parser.add_argument("path", type=Path, nargs="+", help="a bundle, or a file of OpenCL C")
    parser.add_argument("--kernel", default="", metavar="NAME", help="only kernels whose names begin so")
    parser.add_argument("--lanes", action="store_true", help="a bundle's kernels with stream lanes, for mode interleave")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("-j", "--jobs", type=int, default=0, help="compilers at a time; as many as processors by default")
    args = parser.parse_args()
    gpu = gpu_of(args.gpu)
    texts = {name: text for path in args.path for name, text in texts_of(path, lanes=args.lanes).items()}
    chosen = {name: text for name, text in texts.items() if name.startswith(args.kernel)}
    if not chosen:
        raise UserError(f"no kernel's name begins with {args.kernel!r}; there are {', '.join(texts)}")
    report = examine(chosen, gpu, args.jobs)
    print(json.dumps(report.to_dict(), indent=1) if args.json else report.table())
    return 1 if report.failures else 0


if __name__ == "__main__":
    with exit_codes():
        sys.exit(main())
