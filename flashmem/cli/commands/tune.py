"""`flashmem tune`: measure the kernel configs of a device for contractions, and write their tuning database."""

from __future__ import annotations

from pathlib import Path

from flashmem.base.errors import UserError
from flashmem.base.extras import offline_half
from flashmem.base.streams import say
from flashmem.cli.calls.devices import TuneCommand
from flashmem.cli.output.console import progress

FAMILIES = ("matmul", "conv", "matmul_dynamic", "attention", "reduce_rows")


def tune_device(call: TuneCommand) -> Path:
    """Tune a device with a progress bar. Returns the path of the descriptor that names the tuning database.

    Raises:
        UserError: see `profiler.tuning.tune`; an unknown family.
    """
    with offline_half("tuning"):
        from flashmem.profiler.tuning import TuningRequest, summary, tune
    from flashmem.target.descriptor import load_descriptor

    unknown = [family for family in call.family if family not in FAMILIES]
    if unknown:
        raise UserError(f"--family {unknown[0]!r} is unknown; name one of: {', '.join(FAMILIES)}")
    if call.output is not None and call.output.exists() and not call.output.is_dir():
        raise UserError(f"--output {call.output} is not a folder; name one")
    with progress("tuning") as report:
        found = tune(TuningRequest(call.device, call.output, call.minutes, call.family, call.resume), report)
    gained = summary(found.database, load_descriptor(str(found.descriptor)))
    say(f"{found.measured} products measured; {found.path} has {gained}")
    if found.left:
        say(f"{found.left} products are left; call flashmem tune again to go on")
    say(f"use it as --device {found.descriptor}")
    descriptor: Path = found.descriptor
    return descriptor
