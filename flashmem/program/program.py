"""The device program: everything that a device executes, as data.

The compiler writes it, the bundle stores it, the runtime executes it. This package needs neither numpy nor OpenCL. Offsets and
sizes are bytes unless a name says otherwise. A *layer* is one kernel launch: a fused group of operators is one layer, or one
for each slice of its weight. Layers are numbered 1..N in execution order, as in the plan (`flashmem.schedule.plan`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from flashmem.base.json import data_of
from flashmem.base.types import DEFAULT_PAGE, ITEMSIZE, MemoryPath, Precision
from flashmem.program.launches import Arg, Joined, KernelShape, Launch, LaunchOrder, SteadyLaunch, first_and_last
from flashmem.program.tensors import HostEmbeddingLookup, Port, Slice, State, Tensor, array_bytes


@dataclass(frozen=True)
class Program:
    """The device program, without the weights and the plan."""

    memory_path: MemoryPath
    precision: Precision
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    tensors: tuple[Tensor, ...]
    slices: tuple[Slice, ...]
    launches: tuple[Launch, ...]
    host_embeddings: tuple[HostEmbeddingLookup, ...]
    arena_bytes: int
    constants_offset: int  # in weights.bin, page aligned
    constants_bytes: int
    weights_bytes: int  # size of weights.bin
    hands_over: bool = False  # the arena is host memory, and outputs of the right dtype are returned as views of it
    status: str | None = None  # the int32 tensor in which a kernel stores its layer's number after reading a bad index
    build_options: tuple[str, ...] = ()
    order: LaunchOrder | None = None
    live_bytes: int = 0  # the most bytes of activations alive at once, at most `arena_bytes`
    page_bytes: int = DEFAULT_PAGE  # slices start at multiples of it, so that each can be mapped and dropped alone
    steady: tuple[SteadyLaunch, ...] = ()  # ascending; each launch in at most one
    joined: tuple[Joined, ...] = ()
    states: tuple[State, ...] = ()  # neither inputs nor outputs
    states_bytes: int = 0

    @property
    def lowest_precision(self) -> Precision:
        """The lowest of the precisions in which weights, activations and states are stored."""
        kept = {state.tensor for state in self.states if state.dtype == "float32"}
        halves = any(tensor.dtype == "float16" for tensor in self.tensors if tensor.name in kept)
        return "fp16" if halves else self.precision

    def uses(self) -> dict[str, tuple[int, int]]:
        """First and last layer (1-based) that reads each slice."""
        return first_and_last(self.launches, "slice")

    def readable(self) -> dict[str, Slice]:
        """The slices that launches may name: `slices`, and the entries of `joined`."""
        found = {part.name: part for part in self.slices}
        for joined in self.joined:
            parts = [found[name] for name in joined.parts]
            nbytes = sum(part.nbytes for part in parts)
            raw = sum(part.raw for part in parts)
            found[joined.name] = Slice(joined.name, parts[0].weight, parts[0].offset, nbytes, raw=raw)
        return found

    def with_launches_of(self, other: Program) -> Program:
        """This program with the launches of `other`, for first and later runs."""
        return replace(self, launches=other.launches, steady=other.steady, joined=other.joined)

    def to_json(self) -> dict[str, Any]:
        """The program as JSON data, for the bundle."""
        made: dict[str, Any] = data_of(self)
        return made

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Program:
        """The program that `to_json` wrote. Raises KeyError, TypeError or ValueError on any other data."""

        def each(kind: type, rows: list[dict[str, Any]]) -> tuple[Any, ...]:
            return tuple(kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in rows)

        made: dict[int, Any] = {}

        def shared(kind: type, row: dict[str, Any]) -> Any:
            """One object for equal rows."""
            if id(row) not in made:
                made[id(row)] = kind(**row)
            return made[id(row)]

        def launch(row: dict[str, Any]) -> dict[str, Any]:
            args = tuple(shared(Arg, arg) for arg in row["args"])
            shape = shared(KernelShape, row.get("shape", {}))
            return {**row, "args": args, "shape": shape}

        steady = [{**row, "launch": each(Launch, [launch(row["launch"])])[0]} for row in data.get("steady", ())]
        return cls(
            **{
                **data,
                "inputs": each(Port, data["inputs"]),
                "outputs": each(Port, data["outputs"]),
                "tensors": each(Tensor, data["tensors"]),
                "slices": each(Slice, data["slices"]),
                "launches": each(Launch, [launch(row) for row in data["launches"]]),
                "host_embeddings": each(HostEmbeddingLookup, data["host_embeddings"]),
                "build_options": tuple(data["build_options"]),
                "order": LaunchOrder(**data["order"]) if data.get("order") else None,
                "steady": each(SteadyLaunch, steady),
                "joined": each(Joined, list(data.get("joined", ()))),
                "states": each(State, list(data.get("states", ()))),
            }
        )


def fixed_bytes(program: Program, *, shares_memory: bool = True) -> int:
    """Bytes within a session's budget under any plan: activations, states and constants.

    And `host_bytes`, if host and device share their memory: then the budget limits both.
    """
    on_device = program.arena_bytes + program.states_bytes + program.constants_bytes
    return on_device + host_bytes(program) * shares_memory


def host_bytes(program: Program) -> int:
    """Bytes of a session in host memory also with a device that does not share it: copied outputs, and scratch."""
    return output_bytes(program) + scratch_bytes(program)


def raw_bytes(program: Program) -> int:
    """Bytes of the weight file that are elements of the model's weights. The rest is padding of image rows, panels and pages.

    Resident constants count with their stored size.
    """
    tables = [lookup for lookup in program.host_embeddings if lookup.panel == 1]  # the others are part of a weight's panels
    rows = {(table.offset, table.rows * table.row_stride) for table in tables}
    return program.constants_bytes + sum(part.raw for part in program.slices) + sum(nbytes for _, nbytes in rows)


SMALL_OUTPUT = 1 << 16
"""Bytes: a smaller output is copied. The candidates of `bundle.language.MOST_ROWS` rows are smaller."""


LARGE_OUTPUT = 1 << 20
"""Bytes: an output of so many has pinned pages on a device with memory of its own (`runtime.memory.output_pages`)."""


def pinned_output_bytes(program: Program) -> int:
    """Bytes of pinned pages for outputs beside `host_bytes`: the caller may hold the arrays of one run during the next one."""
    copied = (port for port in copied_outputs(program) if port.tensor is not None)
    return sum(nbytes for port in copied if (nbytes := array_bytes(port)) >= LARGE_OUTPUT)


def copied_outputs(program: Program) -> tuple[Port, ...]:
    """The outputs that a run copies, each to a new array. The others are returned as views of the arena.

    Those smaller than `SMALL_OUTPUT` are copied everywhere: that takes less time than moving pages, and leaves those of others.
    """
    stored = {tensor.name: tensor.dtype for tensor in program.tensors}

    def stays(port: Port) -> bool:
        return program.hands_over and stored[str(port.tensor)] == port.dtype and array_bytes(port) >= SMALL_OUTPUT

    return tuple(port for port in program.outputs if port.tensor is not None and not stays(port))


def output_bytes(program: Program) -> int:
    """Bytes of the arrays that outputs are copied to."""
    return sum(array_bytes(port) for port in copied_outputs(program))


def scratch_bytes(program: Program) -> int:
    """Bytes of the largest temporary host array of a run: an input or output in another dtype, or looked-up table rows."""
    tensors = {tensor.name: tensor for tensor in program.tensors}
    sizes = {tensor.name: ITEMSIZE[tensor.dtype] * math.prod(tensor.shape) for tensor in program.tensors}
    ports = [port for port in (*program.inputs, *program.outputs) if port.tensor and port.dtype != tensors[port.tensor].dtype]
    converted = [ITEMSIZE[tensors[str(port.tensor)].dtype] * math.prod(port.shape) for port in ports]
    gathered = [sizes[g.tensor] + g.panel_bytes for g in program.host_embeddings]
    return max(converted + gathered, default=0)
