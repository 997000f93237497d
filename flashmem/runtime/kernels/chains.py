"""Chains: one launch in place of several small ones in a row, on a CPU.

There a launch costs more than the arithmetic of a small layer: the driver wakes its threads for each. The kernel of a chain has
one work-item. It reads a table of the launches and calls their kernels as functions, once for each of their work-items, in
order. Kernels that use local memory, or their place in a work-group of several, are not in chains. A chain is a steady launch
(`flashmem.program.launches`): later runs use it where all its weights are resident.

Chains are made when a bundle is opened, not by the compiler. Which ones gain depends on the cores of the device at hand, which
no descriptor states. And their text, written from kernels and launches that have been checked, addresses whole memories by a
table, so that no check could bound what such a kernel in a bundle accesses.

A program has few chains, and only where they save much: each is a kernel of its own, which takes a second to build and memory
that no budget counts. Between the products of a language model they saved 5 % of a token, and took 40 to 90 MB.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from flashmem.program.kernel_text import Source, code_of, joined_texts, kernel_heads, kernel_source, kernel_texts
from flashmem.program.launches import Arg, Launch, SteadyLaunch
from flashmem.program.program import Program
from flashmem.target.descriptor import DeviceDescriptor

LONGEST_SECONDS = 0.005
"""Estimated seconds of the longest chain: an interrupted run ends after the chain that it is in."""

MOST_NUMBERS = 1 << 14
"""Most numbers in the table of a chain: 64 KB, which every device has for constants (OpenCL 1.2, table 4.3)."""

MOST_CHAINS = 8
"""Most chains of a program: those that save the most."""

WORTH = 0.15
"""The least share of a run's estimated time that the chains of a program must save."""

_ALWAYS_APART = re.compile(r"\b(?:__local|barrier|mem_fence|image2d_t|atomic_\w+|sub_group_\w+|FM_SHUFFLE|FM_TENSOR_CORES)\b")
_WORK_ITEM = re.compile(r"\bget_(?!global_id\b)\w+\(")
_OF_ALL = re.compile(r"\bget_(?!(?:global_id|group_id|local_id|local_size)\b)\w+\(")
"""Functions that tell of all work-items, of which a chain has another number."""

_HEAD = 4
"""Numbers at the begin of a row of the table: the function, and the size in three directions."""

_IDS = "((d) == 0 ? chain_x : (d) == 1 ? chain_y : chain_z)"


@dataclass(frozen=True)
class _Function:
    """A kernel as a function of a chain: the types of its parameters."""

    name: str
    text: str
    types: tuple[str, ...]


def with_chains(program: Program, source: Source, descriptor: DeviceDescriptor, cores: int) -> tuple[Program, Source]:
    """`program` with chains among its steady launches, and `source` with their kernels; unchanged where there are none.

    `cores`: of the device. Layers that have a steady launch are not in chains, and programs with states have none. The choice
    depends on the arguments alone.
    """
    if descriptor.kind != "cpu" or program.memory_path != "buffer" or program.states:
        return program, source
    seconds = _Seconds(program, descriptor, cores)
    least = WORTH * seconds.of_all(program.launches)
    if sum(max(0.0, seconds.gain(launch)) for launch in program.launches) < least:  # before any text is read
        return program, source
    texts = kernel_texts(source.plain)
    saved = {run: seconds.saved(program.launches[run[0] - 1 : run[1]]) for run in _runs(program, texts, seconds)}
    chosen = sorted(sorted((run for run in saved if saved[run] > 0), key=lambda run: -saved[run])[:MOST_CHAINS])
    if not chosen or sum(saved[run] for run in chosen) < least:
        return program, source
    made = []
    kernels = dict[str, str]()
    for first, last in chosen:
        launch, text = _chain(program, range(first - 1, last), texts)
        made.append(SteadyLaunch(first, last, launch))
        kernels[launch.kernel] = text
    steady = tuple(sorted((*program.steady, *made), key=lambda each: each.first))
    return replace(program, steady=steady), replace(
        source, plain=kernel_source(texts | kernels), kernels=(*source.kernels, *kernels)
    )


def joined_launches(name: str, program: Program) -> tuple[Launch, ...]:
    """The launches that the chain of this name is in the place of; none if it is the name of another kernel."""
    chain = next((each for each in program.steady if each.launch.kernel == name and is_chain(each.launch)), None)
    return () if chain is None else program.launches[chain.first - 1 : chain.last]


def is_chain(launch: Launch) -> bool:
    """Whether the launch is a chain: no other has whole memories."""
    return any(arg.kind == "whole" for arg in launch.args)


class _Seconds:
    """Estimated time of a launch on one core, and of what all cores save."""

    def __init__(self, program: Program, descriptor: DeviceDescriptor, cores: int) -> None:
        self._slices = program.readable()
        self._rates = descriptor.rates
        self._cores = max(1, cores)

    def alone(self, launch: Launch) -> float:
        """Seconds of the launch on one core."""
        weights = {str(arg.value) for arg in launch.args if arg.kind == "slice"}
        nbytes = launch.bytes + sum(self._slices[name].nbytes for name in weights)
        return self._cores * (2 * launch.macs / self._rates.gemm_flops + nbytes / self._rates.memory_bandwidth)

    def gain(self, launch: Launch) -> float:
        """Seconds that the launch takes less in a chain: no launch, but one core."""
        return self._together(launch) - self.alone(launch)

    def saved(self, launches: Sequence[Launch]) -> float:
        """Seconds that a chain of launches, which is a launch too, saves."""
        return sum(map(self.gain, launches)) - self._rates.launch_seconds

    def of_all(self, launches: Sequence[Launch]) -> float:
        """Seconds of a run without chains."""
        return sum(map(self._together, launches))

    def _together(self, launch: Launch) -> float:
        """Seconds of the launch without a chain. One that several cores share takes the driver twice as long: it waits for them
        where the launches around it, which are chains, are one core's.
        """
        groups = math.prod(launch.global_size) // math.prod(launch.local_size or (1,))
        sharing = max(1, min(groups, self._cores))
        return self._rates.launch_seconds * min(2, sharing) + self.alone(launch) / sharing


def _runs(program: Program, texts: Mapping[str, str], seconds: _Seconds) -> Iterator[tuple[int, int]]:
    """First and last layers of the chains: neighbours that a chain may contain and that gain from it, at least two."""
    taken = {layer for each in program.steady for layer in range(each.first, each.last + 1)}
    known: dict[tuple[str, tuple[int, ...] | None], bool] = {}

    def may_be_chained(launch: Launch) -> bool:
        key = launch.kernel, launch.local_size
        if key not in known:
            known[key] = _fits(launch, texts)
        return known[key]

    begun = 1
    total = 0.0
    numbers = 0
    for layer, launch in enumerate((*program.launches, None), start=1):
        fits = launch is not None and layer not in taken and seconds.gain(launch) > 0 and may_be_chained(launch)
        took, more = (seconds.alone(launch), _numbers(launch)) if fits and launch is not None else (0.0, 0)
        if not fits or total + took > LONGEST_SECONDS or numbers + more + _HEAD > MOST_NUMBERS:
            if layer - begun > 1:
                yield begun, layer - 1
            begun = layer if fits else layer + 1
            total = 0.0
            numbers = 0
        total = total + took
        numbers = numbers + more


def _numbers(launch: Launch) -> int:
    """The numbers of a launch in the table (`_row`)."""
    return _HEAD + sum(1 if arg.kind in ("int", "float") else 3 for arg in launch.args)


def _fits(launch: Launch, texts: Mapping[str, str]) -> bool:
    code = code_of(texts.get(launch.kernel, ""))
    kernel = next(kernel_heads(code), None)
    if kernel is None or launch.local_size is None or _ALWAYS_APART.search(code) or "get_" in code[: kernel.start]:
        return False
    if _OF_ALL.search(code):
        return False
    if len(kernel.parameters.split(",")) != len(launch.args):  # a stranger's; its driver refuses the launch
        return False
    return math.prod(launch.local_size) == 1 or not _WORK_ITEM.search(code)


def _function(name: str, text: str) -> _Function:
    """The kernel of section `text` as a function that has its work-item as its first parameters.

    Its parameters are not `restrict`: what one call writes, the next one reads. Comments are left out first: without the part
    that is replaced, a part of one could become code.
    """
    code = code_of(text)
    kernel = next(kernel_heads(code))
    parameters = kernel.parameters.replace("\n", " ").replace(" restrict ", " ")
    types = tuple(each.strip().rpartition(" ")[0] for each in parameters.split(","))
    head = f"static void {name}(const size_t chain_x, const size_t chain_y, const size_t chain_z, {parameters.strip()})"
    return _Function(name, code[: kernel.start] + head + code[kernel.end :], types)


def _chain(program: Program, layers: range, texts: Mapping[str, str]) -> tuple[Launch, str]:
    """The launch of a chain of layers (from 0), and its kernel's text."""
    launches = [program.launches[layer] for layer in layers]
    functions = {name: _function(name, texts[name]) for name in dict.fromkeys(launch.kernel for launch in launches)}
    memory = _Memory(program)
    numbers = list(functions)
    table = [number for launch in launches for number in _row(launch, numbers.index(launch.kernel), memory)]
    table += [0] * _HEAD  # llvmpipe reads the head of one more row (`flashmem.runtime.opencl.masked_reads`)
    written = {
        memory.place(arg)[0]
        for launch in launches
        for arg, kind in zip(launch.args, functions[launch.kernel].types, strict=True)
        if arg.kind not in ("int", "float") and "const" not in kind.split()
    }
    text = _text(list(functions.values()), table, len(launches), [place in written for place in range(len(memory.args))])
    name = f"chain_{blake2b(text.encode(), digest_size=5).hexdigest()}"
    launch = Launch(
        name=f"{launches[0].name} to {launches[-1].name}",
        kernel=name,
        global_size=(1,),
        local_size=(1,),
        args=tuple(memory.args),
        operator_class=launches[0].operator_class,
        operators=tuple(operator for each in launches for operator in each.operators),
        macs=sum(each.macs for each in launches),
        bytes=sum(each.bytes for each in launches),
    )
    return launch, text.replace("CHAIN", name)


class _Memory:
    """The memory of a chain, each once: the arena, the states, the constants, and slices."""

    def __init__(self, program: Program) -> None:
        self.args: list[Arg] = []
        self._places: dict[tuple[str, str | int | float], int] = {}
        self._tensors = {tensor.name: tensor for tensor in program.tensors}

    def place(self, arg: Arg) -> tuple[int, int]:
        """The kernel's argument with the memory of `arg`, and the offset in bytes."""
        offset = 0
        whole = arg
        if arg.kind == "tensor":
            tensor = self._tensors[str(arg.value)]
            whole = Arg("whole", "states" if tensor.memory == "states" else "arena")
            offset = tensor.offset
        elif arg.kind == "constant":
            whole = Arg("whole", "constants")
            offset = int(arg.value)
        key = whole.kind, whole.value
        if key not in self._places:
            self._places[key] = len(self.args)
            self.args.append(whole)
        return self._places[key], offset


def _row(launch: Launch, function: int, memory: _Memory) -> list[int]:
    """A launch in the table of a chain: its function, its size, and each argument; an offset takes two numbers."""
    row = [function, *launch.global_size, *([1] * (3 - len(launch.global_size)))]
    for arg in launch.args:
        if arg.kind == "int":
            row.append(int(arg.value))
        elif arg.kind == "float":
            row += struct.unpack("<i", struct.pack("<f", arg.value))
        else:
            place, offset = memory.place(arg)
            row += [place, *struct.unpack("<ii", struct.pack("<q", offset))]
    return row


def _text(functions: Sequence[_Function], table: Sequence[int], steps: int, written: Sequence[bool]) -> str:
    """The text of a chain's kernel, CHAIN in place of its name."""
    pointers = [f"{'' if each else 'const '}uchar* memory_{place}" for place, each in enumerate(written)]
    wholes = ", ".join(f"(__global uchar*)memory_{place}" for place in range(len(written)))
    cases = "\n".join(_case(number, each) for number, each in enumerate(functions))
    return f"""#define get_global_id(d) {_IDS}
#define get_group_id(d) {_IDS}
#define get_local_id(d) 0
#define get_local_size(d) 1
{joined_texts(each.text for each in functions)}#undef get_global_id
#undef get_group_id
#undef get_local_id
#undef get_local_size
__constant int CHAIN_table[{len(table)}] = {{{", ".join(map(str, table))}}};
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void CHAIN({", ".join(f"__global {each}" for each in pointers)})
{{
    __global uchar* const memory[] = {{{wholes}}};
    __constant const int* row = CHAIN_table;
    for (int step = 0; step < {steps}; ++step) {{
        const int size_x = row[1], size_y = row[2], size_z = row[3];
        switch (row[0]) {{
{cases}
        }}
    }}
}}
"""


def _case(number: int, function: _Function) -> str:
    lines = list[str]()
    at = _HEAD
    for place, kind in enumerate(function.types):
        if "*" in kind:
            offset = f"(uint)row[{at + 1}] | (ulong)row[{at + 2}] << 32"
            lines.append(f"{kind} const a{place} = ({kind})(memory[row[{at}]] + ({offset}));")
            at += 3
        else:
            bare = kind.replace("const", "").strip()
            lines.append(f"const {bare} a{place} = {f'row[{at}]' if bare == 'int' else f'as_{bare}(row[{at}])'};")
            at += 1
    arguments = ", ".join(f"a{place}" for place in range(len(function.types)))
    body = "\n                ".join(lines)
    return f"""            case {number}: {{
                {body}
                for (int z = 0; z < size_z; ++z)
                    for (int y = 0; y < size_y; ++y)
                        for (int x = 0; x < size_x; ++x)
                            {function.name}(x, y, z, {arguments});
                row += {at};
                break;
            }}"""
