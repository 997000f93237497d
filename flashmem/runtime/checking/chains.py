"""Checks that a chain does what the launches do that it is in the place of.

A chain has one work-item, which does all of their work in a row: the interpreter would take hours. Its parts are checked by
themselves (`flashmem.runtime.checking.check`), so they show what it should write. Both run with the same drawn memory, and all
bytes are compared: the same text has the same bits wherever a driver compiles it right (`FP_CONTRACT OFF`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.interpreter.errors import UnknownTextError
from flashmem.interpreter.launch import interpret_kernel
from flashmem.runtime.checking.check import GUARD, forms, new_guarded
from flashmem.runtime.checking.drawing import DRAWS, drawn_bytes
from flashmem.runtime.checking.trial import Trial, TrialArgument, Verdict
from flashmem.runtime.opencl.context import CompiledProgram, Context, Queue

Bytes = NDArray[np.uint8]
Memory = dict[str, Bytes]
"""By place: the bytes of a buffer, with its guards."""


def check_chain(
    context: Context, trial: Trial, chain: CompiledProgram, part: Callable[[Trial], CompiledProgram], *, whole: bool
) -> Verdict:
    """Compare one launch of a chain with the launches of its parts, for all draws if it is `whole`.

    Raises:
        RunError: the driver refuses a kernel, or its launch.
    """
    begun = perf_counter()
    try:
        run = _ChainRun(context, trial)
    except UnknownTextError as error:
        return Verdict(note=f"not compared with its parts, of which the interpreter does not know {error}")
    compared = 0
    for draw in DRAWS if whole else DRAWS[:1]:
        before = run.drawn(draw)
        want = run.memory_after(before, [(each, part(each)) for each in trial.parts])
        got = run.memory_after(before, [(trial, chain)])
        for place, expected in want.items():
            wrong = _differing(got[place], expected)
            if wrong.size:
                where = int(wrong[0]) - GUARD
                said = f"{trial.name}: {wrong.size} bytes of the {place} are not what its parts write, with {draw} numbers"
                return Verdict(f"{said}; the first is byte {where}", seconds=perf_counter() - begun)
            compared += (expected.nbytes - 2 * GUARD) // 4
    return Verdict(twin=compared, whole=whole, seconds=perf_counter() - begun)


class _ChainRun:
    """The memory of a chain on a device, for the chain and for its parts."""

    def __init__(self, context: Context, trial: Trial) -> None:
        self._context = context
        self._trial = trial
        self._queue: Queue = context.queue()
        self._kinds = [
            (argument, parameter.type.name)
            for each in trial.parts
            for argument, parameter in zip(
                each.arguments, interpret_kernel(each.text, each.name, forms(context, each.text)).parameters, strict=True
            )
            if argument.kind == "buffer"
        ]

    def drawn(self, draw: str) -> Memory:
        """Drawn content. What two parts use at the same place has the type of the first one, which reads it."""
        memory: Memory = {}
        for number, argument in enumerate(self._trial.arguments):
            guarded = new_guarded(1, argument.nbytes)[0]
            guarded[GUARD : GUARD + argument.nbytes] = drawn_bytes(argument.nbytes, "float", draw, str(number), weights=False)
            memory[argument.place] = guarded
        for number, (argument, kind) in reversed(list(enumerate(self._kinds))):
            begin = GUARD + argument.offset
            weights = argument.place.startswith("slice")
            memory[argument.place][begin : begin + argument.nbytes] = drawn_bytes(
                argument.nbytes, kind, draw, f"{number} of a part", weights=weights
            )
        return memory

    def memory_after(self, before: Memory, launches: Sequence[tuple[Trial, CompiledProgram]]) -> Memory:
        """What is in memory after launches in order, which begin with `before`."""
        buffers = {place: self._context.buffer(content.nbytes) for place, content in before.items()}
        for place, content in before.items():
            self._queue.write(buffers[place], content)
        kept = []  # a kernel does not keep its arguments alive
        for launch, program in launches:
            arguments = [self._argument(each, buffers) for each in launch.arguments]
            kept.append(arguments)
            size, group = launch.size
            self._queue.launch(self._queue.prepare(program.kernel(launch.name, arguments), size, group))
        self._queue.finish()
        after = {place: np.empty_like(content) for place, content in before.items()}
        for place, content in after.items():
            self._queue.read(content, buffers[place])
        return after

    def _argument(self, argument: TrialArgument, buffers: dict[str, Any]) -> Any:
        if argument.kind == "int":
            return np.int32(argument.value)
        if argument.kind == "float":
            return np.float32(argument.value)
        return self._context.sub_buffer(buffers[argument.place], GUARD + argument.offset, argument.nbytes)


def _differing(got: Bytes, want: Bytes) -> NDArray[np.int64]:
    """The places of bytes that differ, but those of floats that are both NaN."""
    wrong = got != want
    if wrong.any():
        end = len(want) // 4 * 4
        floats = np.isnan(got[:end].view(np.float32)) & np.isnan(want[:end].view(np.float32))
        wrong[:end] &= ~np.repeat(floats, 4)
    return np.flatnonzero(wrong)
