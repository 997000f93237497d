"""The command line, on a desk and on a phone: `flashmem doctor | compile | run | generate | queue | plan | check | cache ...`.

`flashmem.cli.calls` describes the calls of the commands, and `flashmem.cli.parser` reads them. Their work is in
`flashmem.cli.commands`, which is imported when a command runs: `run` of a bundle imports the online half only.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from flashmem.base.errors import UserError
from flashmem.base.interrupts import unwinding
from flashmem.base.streams import EXIT_USER_ERROR, exit_codes, prepare_streams
from flashmem.base.version import __version__
from flashmem.cli.calls import bundles, devices, models
from flashmem.cli.parser import parse

COMMANDS: Mapping[str, Any] = {
    "devices": devices.DevicesCommand,
    "doctor": devices.DoctorCommand,
    "compile": models.CompileCommand,
    "run": models.RunCommand,
    "generate": models.GenerateCommand,
    "serve": models.ServeCommand,
    "plan": models.PlanCommand,
    "check": bundles.CheckCommand,
    "verify": bundles.VerifyCommand,
    "replan": bundles.ReplanCommand,
    "profile": devices.ProfileCommand,
    "tune": devices.TuneCommand,
    "queue": bundles.QueueCommand,
    "design": devices.DesignCommand,
    "simulate": models.SimulateCommand,
    "sweep": devices.SweepCommand,
    "demo": models.DemoCommand,
    "zoo list": devices.ListZooCommand,
    "zoo export": devices.ExportZooCommand,
    "cache": bundles.ListCacheCommand,
    "cache clear": bundles.ClearCacheCommand,
}
"""The calls of the commands, in the order of the help text."""

TITLE = "Run neural networks larger than memory on OpenCL devices."


def main() -> None:
    """Run the command line in `sys.argv`; always raises SystemExit."""
    prepare_streams()
    with exit_codes(), unwinding():
        sys.exit(call(sys.argv[1:]))


def call(words: Sequence[str]) -> int:
    """Do what `words` ask for; returns the exit code.

    Raises:
        UserError: an unknown command or option, or the errors of the command.
        SystemExit: help was asked for.
    """
    if words[:1] in (["--version"], ["--help"], ["-h"]):
        print(help_of("") if words[0] != "--version" else f"flashmem {__version__}")
        return 0
    if not words:
        print(help_of(""), file=sys.stderr)
        return EXIT_USER_ERROR
    name = next((name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS), None)
    if name is None:
        return _group(words)
    if not COMMANDS[name].is_here():
        raise UserError(f"flashmem {name} is not installed here; use it where all of flashmem is, not flashmem-runtime alone")
    asked = parse(name, COMMANDS[name], words[len(name.split()) :])
    return asked.run() or 0


def help_of(group: str) -> str:
    """The commands that are installed, or those of a group, with the first sentence of each one's help."""
    lines = [TITLE, "", f"usage: flashmem {group}{' ' if group else ''}[--help] [--version] COMMAND ...", ""]
    for name, described in COMMANDS.items():
        if name.startswith(group) and described.is_here():
            text = inspect.cleandoc(described.__doc__ or "").partition("\n\n")[0]
            lines.append(textwrap.fill(text, 100, initial_indent=f"  {name:<12} ", subsequent_indent=" " * 15))
    return "\n".join([*lines, "", "flashmem COMMAND --help shows the options of a command."])


def _group(words: Sequence[str]) -> int:
    """Help for a group of commands, or an error for words that begin with no command."""
    inside = [name for name in COMMANDS if name.startswith(f"{words[0]} ")]
    if inside and words[1:2] in (["--help"], ["-h"]):
        print(help_of(words[0]))
        return 0
    known = inside or [*COMMANDS]
    near = difflib.get_close_matches(" ".join(words[:2]) if inside else words[0], known, 1)
    hint = f"did you mean {near[0]}?" if near else f"name one of: {', '.join(known)}"
    raise UserError(f"flashmem has no command {' '.join(words[:2]) if inside else words[0]}; {hint}")
