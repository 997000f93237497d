"""Checks that a driver makes of a kernel what its text says.

One launch runs on the device with drawn memory. What it wrote is compared with two others:

- the *twin*: the same text, compiled with `-cl-opt-disable`. All elements are compared.
- the *interpreter* (`flashmem.interpreter`), which no compiler takes part in. It executes some work-groups, among them those at
  the grid's ends, where tails are.

The tolerance is the error bound that the interpreter carries along; elements without one are equal to the bit. Bytes behind and
before each buffer, and all that a kernel may not write, must be as they were. The launch is repeated, because a race need not
show the first time. The twin is left out where the interpreter executes all work-groups.
"""

from __future__ import annotations

import math
import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.interpreter.errors import OutsideError, UnknownTextError
from flashmem.interpreter.launch import InterpretedKernel, Written, interpret_kernel
from flashmem.interpreter.syntax import Parameter
from flashmem.runtime.checking.drawing import DRAWS, ITEMSIZES, drawn_bytes, drawn_texels
from flashmem.runtime.checking.trial import Trial, TrialArgument, Verdict
from flashmem.runtime.opencl.context import CompiledProgram, Context, Queue

GUARD = 4096
"""Bytes before and behind each buffer that a kernel must leave alone."""

MOST_ITEMS = 512
"""Work-items that the interpreter executes at a time, if work-groups are not larger."""

ELEMENTS = 1536
"""Elements of each draw that the interpreter writes, if work-groups do not write more."""

FEWEST_GROUPS = 6
"""Work-groups that it executes, if there are so many: where tails are, and between."""

SAFETY = 4.0
"""Factor on error bounds, which are of first order, and for sums in another order (tensor cores, subgroups)."""

REPEATS = 200
"""Runs of a launch that must agree: a race that shows in one of fifty is found in 98 of 100."""

FEW_REPEATS = 20
"""Runs where work-items share nothing but what they read: nothing can race, but registers may hold what an earlier run left."""

_SHARING = re.compile(r"\b(barrier|work_group_barrier|sub_group_\w+|atomic_\w+|atom_\w+|__local|local)\b|shfl|mma")

REPEAT_SECONDS = 0.15
"""Seconds after which no further repetition begins."""


Bytes = NDArray[np.uint8]


class _WrongError(Exception):
    """The driver's kernel does something else than its text."""


@dataclass
class _Memory:
    """One argument's memory for all draws: bytes with guards, [draws or 1, bytes], or texels; may the kernel write it?"""

    argument: TrialArgument
    parameter: Parameter
    guarded: Any
    written: bool

    @property
    def is_image(self) -> bool:
        """Whether it is a texture, which has no guards."""
        return self.argument.kind == "image"

    @cached_property
    def content(self) -> Any:
        """The content of all draws: one array, by which the interpreter knows the memory."""
        return self.guarded if self.is_image else self.guarded[:, GUARD : GUARD + self.argument.nbytes]

    def of(self, draw: int) -> Any:
        """The content for a draw, with its guards."""
        return self.guarded[min(draw, len(self.guarded) - 1)]


def check_kernel(
    context: Context, trial: Trial, program: CompiledProgram, twin: Callable[[], CompiledProgram] | None = None
) -> Verdict:
    """Check one launch of `program` on a device. `twin` gives the same text compiled without optimisation, if it is asked for;
    None: only what the interpreter executes is compared.

    Raises:
        RunError: the driver refuses the kernel, or its launch.
    """
    begun = perf_counter()
    try:
        kernel = interpret_kernel(trial.text, trial.name, forms(context, trial.text))
        verdict = TrialRun(context, trial, kernel).run(program, twin)
    except _WrongError as error:
        verdict = Verdict(str(error))
    except UnknownTextError as error:
        verdict = Verdict(note=f"not compared with the interpreter, which does not know {error}")
    except OutsideError as error:
        verdict = Verdict(f"{trial.name}: {error}")
    return replace(verdict, seconds=perf_counter() - begun)


class TrialRun:
    """One launch on a device: its drawn memory, what it writes, and what it should write."""

    def __init__(self, context: Context, trial: Trial, kernel: InterpretedKernel) -> None:
        self._context = context
        self._trial = trial
        self._kernel = kernel
        self._queue: Queue = context.queue()
        self._whole = False  # whether the interpreter executes all work-groups
        self._memory: dict[str, _Memory] = {}
        self._order: list[_Memory | TrialArgument] = []
        written = {
            argument.place
            for argument, parameter in zip(trial.arguments, kernel.parameters, strict=True)
            if not parameter.constant and parameter.is_memory
        }
        for argument, parameter in zip(trial.arguments, kernel.parameters, strict=True):
            if argument.kind in ("int", "float"):
                self._order.append(argument)
                continue
            if argument.place not in self._memory:
                self._memory[argument.place] = self._drawn(argument, parameter, argument.place in written)
            self._order.append(self._memory[argument.place])

    def _drawn(self, argument: TrialArgument, parameter: Parameter, written: bool) -> _Memory:
        salt = str(list(self._memory))
        if argument.kind == "image":
            width, height, channel = argument.shape
            return _Memory(argument, parameter, drawn_texels(width, height, channel, salt)[None], written)
        weights = argument.place.startswith(("slice", "staging"))
        draws = DRAWS[:1] if weights and not written else DRAWS
        guarded = new_guarded(len(draws), argument.nbytes)
        for row, draw in zip(guarded, draws, strict=True):
            row[GUARD : GUARD + argument.nbytes] = drawn_bytes(
                argument.nbytes, parameter.type.name, draw, salt, weights=weights
            )
        return _Memory(argument, parameter, guarded, written)

    # -- on the device

    def _buffer(self, memory: _Memory) -> tuple[Any, Any]:
        """A buffer with guards, and the part of it that the kernel gets."""
        whole = self._context.buffer(memory.argument.nbytes + 2 * GUARD)
        return whole, self._context.sub_buffer(whole, GUARD, memory.argument.nbytes)

    def _device_memory(self, draw: int) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of the launch on the device, and the buffers by place."""
        whole: dict[str, Any] = {}
        parts: dict[str, Any] = {}
        for place, memory in self._memory.items():
            if memory.is_image:
                width, height, channel = memory.argument.shape
                whole[place] = parts[place] = self._context.image(width, height, channel)  # type: ignore[arg-type]
            else:
                whole[place], parts[place] = self._buffer(memory)
            self._fill(whole[place], memory, draw)
        arguments = [
            parts[each.argument.place] if isinstance(each, _Memory)
            else np.int32(each.value) if each.kind == "int" else np.float32(each.value)
            for each in self._order
        ]  # fmt: skip
        return arguments, whole

    def _fill(self, target: Any, memory: _Memory, draw: int) -> None:
        """Write the drawn content to a texture, or to a buffer with its guards."""
        content = memory.of(draw)
        if memory.is_image:
            rows, width, _ = content.shape
            data = np.ascontiguousarray(content).view(np.uint8).reshape(-1)
            self._queue.write_image(target, data, first_row=0, width=width, rows=rows, row_pitch=data.nbytes // rows)
        else:
            self._queue.write(target, content)

    def _launch(self, program: CompiledProgram, arguments: list[Any]) -> Any:
        whole, group = self._trial.size
        return self._queue.prepare(program.kernel(self._trial.name, arguments), whole, group)

    def _read(self, memory: _Memory, whole: Any) -> Any:
        """What is in a texture, or in a buffer with its guards."""
        found = np.empty_like(memory.guarded[0])
        if memory.is_image:
            self._queue.read_image(found, whole)
        else:
            self._queue.read(found, whole)
        return found

    def _results(self, whole: dict[str, Any], draw: int, who: str) -> dict[str, Bytes]:
        """What the launch left in each written memory, as bytes; that nothing else has changed."""
        found: dict[str, Bytes] = {}
        name = f"{self._trial.name}: {who}"
        for place, memory in self._memory.items():
            read = self._read(memory, whole[place])
            before = memory.of(draw)
            if memory.is_image:
                if memory.written:
                    found[place] = read.reshape(-1).view(np.uint8)
                elif not np.array_equal(read, before, equal_nan=read.dtype.kind == "f"):
                    raise _WrongError(f"{name} writes to the texture {memory.parameter.name!r}")
                continue
            end = GUARD + memory.argument.nbytes
            for part, where in ((slice(GUARD), "before"), (slice(end, None), "behind")):
                if not np.array_equal(read[part], before[part]):
                    raise _WrongError(f"{name} writes {where} the memory of {memory.parameter.name!r}")
            if memory.written:
                last = slice(GUARD + memory.argument.writable, end)
                if not np.array_equal(read[last], before[last]):
                    raise _WrongError(f"{name} writes behind the last element of {memory.parameter.name!r}")
                found[place] = read[GUARD:end]
            elif not np.array_equal(read, before):
                raise _WrongError(f"{name} writes to {memory.parameter.name!r}, which it only reads")
        return found

    def results_of(self, program: CompiledProgram, draw: int) -> dict[str, Bytes]:
        """What the launch writes to each argument that it may write, by place."""
        arguments, whole = self._device_memory(draw)
        self._queue.launch(self._launch(program, arguments))
        self._queue.finish()
        return self._results(whole, draw, "the driver's kernel")

    # -- the comparisons

    def run(self, program: CompiledProgram, twin: Callable[[], CompiledProgram] | None = None) -> Verdict:
        """Compare all draws: with the interpreter's, and where it does not execute all work-groups, with the twin's.

        Raises _WrongError.
        """
        group = self._trial.size[1] or (1,) * len(self._trial.size[0])
        groups = _sample(self._trial.size[0], group, self._trial.key, self._written_elements())
        self._whole = len(groups) == int(np.prod([-(-n // each) for n, each in zip(self._trial.size[0], group, strict=True)]))
        expected = self._interpret(groups, group)
        compared = same = 0
        note = ""
        for draw in range(len(DRAWS)):
            arguments, whole = self._device_memory(draw)
            launch = self._launch(program, arguments)
            self._queue.launch(launch)
            self._queue.finish()
            results = self._results(whole, draw, "the driver's kernel")
            for written, place in expected:
                compared += self._compare(results[place], written, draw)
            if draw == 0:
                self._repeat(launch, whole, results)
            if self._whole or twin is None or note:
                continue
            others = self._of_twin(twin(), arguments, whole, expected, draw)
            if others is None:
                note = "the driver's unoptimised kernel is wrong, so that elements outside of the sample are not compared"
                continue
            for written, place in expected:
                same += self._compare_twin(results[place], others[place], written, draw)
        return Verdict(compared=compared, twin=same, whole=self._whole or same > 0, note=note)

    def _of_twin(
        self, twin: CompiledProgram, arguments: list[Any], whole: dict[str, Any], expected: list[tuple[Written, str]], draw: int
    ) -> dict[str, Bytes] | None:
        """What the unoptimised kernel writes; None if that is wrong, by the interpreter."""
        self._restore(whole, draw)
        self._queue.launch(self._launch(twin, arguments))
        self._queue.finish()
        try:
            found = self._results(whole, draw, "the unoptimised kernel")
            for written, place in expected:
                self._compare(found[place], written, draw)
        except _WrongError:
            return None
        return found

    def _restore(self, whole: dict[str, Any], draw: int) -> None:
        """Write the drawn content again where a launch wrote."""
        for place, memory in self._memory.items():
            if memory.written:
                self._fill(whole[place], memory, draw)

    def _written_elements(self) -> int:
        """Elements that the whole launch may write."""
        return sum(
            int(memory.guarded[0].size) if memory.is_image
            else memory.argument.writable // ITEMSIZES[memory.parameter.type.name]
            for memory in self._memory.values()
            if memory.written
        )  # fmt: skip

    def _interpret(self, groups: list[tuple[int, ...]], group: Sequence[int]) -> list[tuple[Written, str]]:
        arguments = [each.content if isinstance(each, _Memory) else each.value for each in self._order]
        given = [
            each.content[0] if isinstance(each, _Memory) and each.argument.kind == "image" else content
            for each, content in zip(self._order, arguments, strict=True)
        ]
        done = self._kernel.run(self._trial.size[0], group, groups, given, len(DRAWS))
        by_name = {
            each.parameter.name: each.argument.place for each in self._order if isinstance(each, _Memory) and each.written
        }
        return [(written, by_name[written.parameter.name]) for written in done if written.parameter.name in by_name]

    def _compare(self, result: Bytes, written: Written, draw: int) -> int:
        """Compare the elements that the interpreter wrote, and if it executed the whole launch, all of them; their number."""
        want, where = written.of(draw)
        if self._whole:
            where = np.ones_like(where)
        got = result[: want.nbytes].view(want.dtype)
        bound = None if written.errors is None else written.errors[draw]
        difference = _beyond(got, want, None if bound is None else SAFETY * bound)
        wrong = difference & where
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise _WrongError(
                f"{self._trial.name}: {int(wrong.sum())} of {int(where.sum())} elements of {written.parameter.name!r} are "
                f"wrong with {DRAWS[draw]} numbers; element {at} is {got[at]} and should be {want[at]}"
                + (f" within {SAFETY * float(bound[at]):.2g}" if bound is not None and bound[at] else "")
            )
        return int(where.sum()) if bound is None else int((where & np.isfinite(bound)).sum())

    def _compare_twin(self, result: Bytes, other: Bytes, written: Written, draw: int) -> int:
        """Compare all elements with those of the unoptimised kernel, within the largest error bounds of the sample."""
        dtype = written.elements.dtype
        count = len(result) // dtype.itemsize * dtype.itemsize
        got = result[:count].view(dtype)
        want = other[:count].view(dtype)
        allowed: NDArray[Any] | None = None
        if written.errors is not None:
            bound = written.errors[draw][written.where[draw]].astype(np.float64)
            values = written.elements[draw][written.where[draw]]
            if not np.isfinite(bound).all():
                return 0  # elements depend on how others are rounded, and which do is known of the sample alone
            if bound.any():
                with np.errstate(all="ignore"):
                    size = np.abs(values.astype(np.float64))
                    share = float(np.nanmax(np.where(size > 0, bound / size, 0.0), initial=0.0))
                    allowed = 2 * SAFETY * (float(bound.max()) + min(share, 2.0**-8) * np.abs(want.astype(np.float64)))
        wrong = _beyond(got, want, allowed)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise _WrongError(
                f"{self._trial.name}: {int(wrong.sum())} of {len(got)} elements of {written.parameter.name!r} differ from the "
                f"unoptimised kernel's with {DRAWS[draw]} numbers; element {at} is {got[at]}, not {want[at]}"
            )
        return len(got)

    def _repeat(self, launch: Any, whole: dict[str, Any], results: dict[str, Bytes]) -> None:
        """Run the launch again and again: it must write the same."""
        written = [(place, memory) for place, memory in self._memory.items() if memory.written]
        end = perf_counter() + REPEAT_SECONDS
        for repetition in range(REPEATS if _SHARING.search(self._trial.text) else FEW_REPEATS):
            if perf_counter() > end:
                return
            self._restore(whole, 0)
            self._queue.launch(launch)
            self._queue.finish()
            for place, memory in written:
                again = self._read(memory, whole[place])
                content = again.reshape(-1).view(np.uint8) if memory.is_image else again[GUARD : GUARD + memory.argument.nbytes]
                if not np.array_equal(content, results[place]):
                    raise _WrongError(f"{self._trial.name}: run {repetition + 2} of the same launch has another result")


def forms(context: Context, text: str) -> tuple[tuple[str, str], ...]:
    """Names that the functions of the device's instructions define and that choose a form of numbers in the text itself."""
    ahead = context.device.with_instructions(text)
    return tuple((name, "1") for name in _FORMS if f"#define {name}\n" in ahead)


_FORMS = ("FM_DOT_UNSIGNED",)


def new_guarded(draws: int, nbytes: int) -> Bytes:
    """Memory for `draws` contents of `nbytes` bytes, each between guards."""
    guarded = np.empty((draws, nbytes + 2 * GUARD), np.uint8)
    guarded[:, :GUARD] = guarded[:, GUARD + nbytes :] = _GUARD
    return guarded


_GUARD: Bytes = np.tile(np.frombuffer(b"\xa5\x5a\xc3\x3c", np.uint8), GUARD // 4)


def _beyond(got: NDArray[Any], want: NDArray[Any], allowed: NDArray[Any] | None) -> NDArray[np.bool_]:
    """Where two arrays differ by more than is allowed; NaN equals NaN, and infinity itself."""
    with np.errstate(all="ignore"):
        difference = np.abs(got.astype(np.float64) - want.astype(np.float64))
        if got.dtype.kind != "f":
            return np.asarray(got != want if allowed is None else difference > np.floor(allowed))
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        return np.asarray(~same if allowed is None else ~(same | (difference <= allowed + _SMALLEST) | ~np.isfinite(allowed)))


_SMALLEST = 2.0**-125
"""Devices may take numbers below the normal ones for zero (OpenCL 3.0, section 7.5.3)."""


def _sample(size: Sequence[int], group: Sequence[int], seed: str, elements: int) -> list[tuple[int, ...]]:
    """Work-groups to interpret: the first and the last in each direction, and others drawn, up to `MOST_ITEMS` work-items or
    `ELEMENTS` of the `elements` that the launch writes."""
    counts = [-(-whole // each) for whole, each in zip(size, group, strict=True)]
    by_elements = ELEMENTS * math.prod(counts) // max(1, elements)
    most = max(FEWEST_GROUPS, min(by_elements, MOST_ITEMS // (len(DRAWS) * math.prod(group))))
    corners = list(dict.fromkeys(product(*((0, count - 1) for count in counts))))
    if len(corners) > most:
        corners = [corners[0], corners[-1], *corners[1:-1]][:most]
    found = dict.fromkeys(corners)
    generator = random.Random(zlib.crc32(seed.encode()))
    for _ in range(4 * most):
        if len(found) >= min(most, int(np.prod(counts))):
            break
        found.setdefault(tuple(generator.randrange(count) for count in counts))
    return list(found)
