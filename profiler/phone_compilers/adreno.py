"""Parse the output of freedreno's compiler ir3 with IR3_SHADER_DEBUG=cs: assembly and a summary of each kernel."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flashmem.profiler.phone_compilers.compiling import Compiled
from flashmem.profiler.phone_compilers.statistics import KernelStatistics, LoopStatistics, bodies, main_loop

_PREFIX = re.compile(r"^MESA: info: ", re.MULTILINE)
_SUMMARY = re.compile(r"; CL prog \S+ (.*)")
_COUNT = re.compile(r"(\d+) ([a-z0-9_() -]+?)(?:,|$)")
_LABEL = re.compile(r"(\w+):$")
_JUMP = re.compile(r"\b(?:br\w*|jump)\b.*#(\w+)")
_REPEATED = re.compile(r"\(rpt(\d+)\)")
_WAITED = re.compile(r"\(nop(\d+)\)")
_FLAGS = re.compile(r"\([a-z0-9]+\)")
_MNEMONIC = re.compile(r"(?:^|\s)([a-z][\w.]*)")
_ELEMENTS = re.compile(r", (\d+)$")
_TEXTURES = ("sam", "isam", "saml", "gat", "ldib")
_SCRATCH = ("ldp", "stp")
_LOCAL = ("ldl", "stl")
_MACS = ("mad.f32", "mad.f16")
_BRANCHES = ("br", "jump")
_ZEROS = "clz."


def parse(kernel: str, compiled: Compiled) -> KernelStatistics | None:
    """The statistics of the last kernel in the output; None if it has no kernel."""
    programs = _PREFIX.sub("", compiled.printed).split("Native code for ")[1:]
    if not programs:
        return None
    code, summary = _read(programs[-1])
    whole = _counted(code)
    labels = {match[1]: at for at, line in enumerate(code) if (match := _LABEL.match(line))}
    jumps = [(labels[match[1]], at) for at, line in enumerate(code) if (match := _JUMP.search(line)) and match[1] in labels]
    loops = bodies([(to, at) for to, at in jumps if to <= at])
    said = next(iter(compiled.kernels.values()), {})  # a text has one kernel, whose name may differ from `kernel`
    main, around = main_loop(loops, lambda at: _counted([code[each] for each in at]))
    return KernelStatistics(
        kernel=kernel,
        instructions=summary.get("instr", 0),
        slots=whole.slots,
        # Numbers of vectors of four; two halves share a register of 32 bits.
        registers=4 * max(summary.get("full", -1) + 1, -(-(summary.get("half", -1) + 1) // 2)),
        spills=whole.stack,
        emulated=sum(_name(line).startswith(_ZEROS) for line in code),
        threads=summary.get("max_waves", 0),
        work_group=said.get("work_group", 0),
        local_bytes=said.get("local_bytes", 0),
        private_bytes=said.get("private_bytes", 0),
        seconds=compiled.seconds,
        loops=len(loops),
        main_loop=main,
        around=around,
    )


def _read(program: str) -> tuple[list[str], dict[str, int]]:
    """The lines of code, and the numbers of the summary by name."""
    code: list[str] = []
    summary: dict[str, int] = {}
    for line in program.splitlines()[1:]:
        if match := _SUMMARY.match(line):
            summary |= {name.strip(): int(count) for count, name in _COUNT.findall(match[1])}
        elif summary and not line.startswith(";"):
            break
        elif line and not line.startswith((";", "@")):
            code.append(line)
    return code, summary


def _name(line: str) -> str:
    """The instruction's name; empty for a label."""
    found = _MNEMONIC.search(_FLAGS.sub(" ", line))
    return found[1] if found and not _LABEL.match(line) else ""


def _counted(code: Sequence[str]) -> LoopStatistics:
    """Statistics of the instructions in `code`."""
    names = ("instructions", "slots", "macs", "half_macs", "load_bytes", "loads", "textures", "local", "stack", "branches")
    counts = dict.fromkeys(names, 0)
    for line in code:
        if _LABEL.match(line):
            continue
        times = 1 + sum(int(match[1]) for match in [_REPEATED.search(line)] if match)
        name = _name(line)
        counts["instructions"] += 1
        counts["slots"] += times + sum(int(match[1]) for match in [_WAITED.search(line)] if match)
        if name in _MACS:
            counts["macs"] += times
            counts["half_macs"] += times * name.endswith("f16")
        elif name.startswith("ldg"):
            elements = _ELEMENTS.search(line)
            width = 4 if "32" in name else 2 if "16" in name else 1
            counts["loads"] += 1
            counts["load_bytes"] += width * (int(elements[1]) if elements else 1)
        elif name.startswith(_TEXTURES):
            counts["textures"] += 1
        elif name.startswith(_SCRATCH):
            counts["stack"] += 1
        elif name.startswith(_LOCAL):
            counts["local"] += 1
        elif name.startswith(_BRANCHES):
            counts["branches"] += 1
    return LoopStatistics(**counts)
