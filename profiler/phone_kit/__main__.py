"""Makes a phone kit: `python -m flashmem.profiler.phone_kit [-o flashmem-phone-kit.pyz] [--device NAME ...]`.

Needs a checkout, the `compile` extra, onnxruntime and hatchling; no device.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flashmem.base.files import check_target
from flashmem.base.interrupts import unwinding
from flashmem.base.streams import exit_codes, prepare_streams, say


def main() -> None:
    """Make the kit, and print its path."""
    prepare_streams()
    parser = argparse.ArgumentParser("python -m flashmem.profiler.phone_kit", description="Make a phone kit.")
    parser.add_argument("-o", "--output", type=Path, default=Path("flashmem-phone-kit.pyz"), metavar="FILE", help="the kit")
    parser.add_argument(
        "--device", action="append", metavar="NAME", help="a descriptor; repeatable; default: those of phones, and generic-gpu"
    )
    given = parser.parse_args()
    with exit_codes(), unwinding():
        from .packing import PHONES, write_phone_kit

        check_target(given.output, "--output")
        print(write_phone_kit(given.output, given.device or PHONES, lambda what, done: say(f"{100 * done:.0f} % {what}")))


if __name__ == "__main__":
    main()
