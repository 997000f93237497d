"""Parse the output of panfrost's compiler with BIFROST_MESA_DEBUG=shaders,shaderdb: blocks of code, and a summary."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flashmem.profiler.phone_compilers.compiling import Compiled
from flashmem.profiler.phone_compilers.statistics import KernelStatistics, LoopStatistics, bodies, main_loop

_SUMMARY = re.compile(
    r"^MESA_SHADER_KERNEL shader: (\d+) instrs.*?(\d+) threads.*?(\d+):(\d+) spills:fills.*?(\d+) registers used", re.MULTILINE
)
_BLOCK = re.compile(r"^block(\d+) \{\n(.*?)^\} ?(->[^\n]*)?", re.DOTALL | re.MULTILINE)
_TO = re.compile(r"block(\d+)")
_INSTRUCTION = re.compile(r"(?:[\w:^., ]+ = )?([A-Z][A-Z0-9_]*)((?:\.\w+)*)")
_ZEROS = "CLZ"
_BITS = re.compile(r"\.i(\d+)")


def parse(kernel: str, compiled: Compiled) -> KernelStatistics | None:
    """The statistics of the last kernel in the output; None if it has no kernel."""
    summaries = list(_SUMMARY.finditer(compiled.printed))
    if not summaries:
        return None
    instructions, threads, spills, fills, registers = map(int, summaries[-1].groups())
    blocks = _blocks(compiled.printed[: summaries[-1].start()])
    at = {number: index for index, (number, _, _) in enumerate(blocks)}
    back = [(at[to], index) for index, (_, _, after) in enumerate(blocks) for to in after if at.get(to, index + 1) <= index]
    loops = bodies(back)
    said = next(iter(compiled.kernels.values()), {})  # a text has one kernel, whose name may differ from `kernel`
    main, around = main_loop(loops, lambda at: _count([line for index in at for line in blocks[index][1]]))
    return KernelStatistics(
        kernel=kernel,
        instructions=instructions,
        slots=instructions,
        registers=registers,
        spills=spills + fills,
        emulated=sum(_name(line) == _ZEROS for _, code, _ in blocks for line in code),
        threads=threads,
        work_group=said.get("work_group", 0),
        local_bytes=said.get("local_bytes", 0),
        private_bytes=said.get("private_bytes", 0),
        seconds=compiled.seconds,
        loops=len(loops),
        main_loop=main,
        around=around,
    )


def _blocks(printed: str) -> list[tuple[int, list[str], list[int]]]:
    """Blocks of the last listing, made after register allocation: number, instructions, successors."""
    found = [
        (int(match[1]), match[2].splitlines(), [int(to) for to in _TO.findall((match[3] or "").split("from")[0])])
        for match in _BLOCK.finditer(printed)
    ]
    start = max((i for i in range(1, len(found)) if found[i][0] <= found[i - 1][0]), default=0)
    return found[start:]


def _name(line: str) -> str:
    """The instruction's name; empty for an empty line."""
    found = _INSTRUCTION.match(line.strip())
    return found[1] if found else ""


def _count(code: Sequence[str]) -> LoopStatistics:
    """Statistics of the instructions in `code`. Each instruction uses one slot."""
    counts = dict.fromkeys(("instructions", "slots", "macs", "load_bytes", "loads", "textures", "local", "stack"), 0)
    for line in code:
        match = _INSTRUCTION.match(line.strip())
        if match is None:
            continue
        name, suffix = match.groups()
        counts["instructions"] += 1
        counts["slots"] += 1
        if name in ("FMA", "FMA_RSCALE"):
            counts["macs"] += 2 if ".v2f16" in suffix else 1
        elif name.startswith("TEX"):
            counts["textures"] += 1
        elif name.startswith(("LOAD", "STORE")) and ".tl" in suffix:
            counts["stack"] += 1
        elif name.startswith(("LOAD", "STORE")) and ".wls" in suffix:
            counts["local"] += 1
        elif name.startswith("LOAD"):
            bits = _BITS.search(suffix)
            counts["loads"] += 1
            counts["load_bytes"] += int(bits[1]) // 8 if bits else 4
    return LoopStatistics(**counts)
