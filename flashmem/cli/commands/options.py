"""Command line options for typer: those that several commands share, and the group that determines a bundle."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from flashmem.cli.commands.compiling import CompileOptions
from flashmem.schedule.modes import MODES
from flashmem.schedule.objectives import AUTO, KINDS


class Quantize(StrEnum):
    """What float32 weights become."""

    INT4 = "int4"
    INT8 = "int8"


class Precision(StrEnum):
    """How weights and activations are stored, and multiplied."""

    FP32 = "fp32"
    FP16 = "fp16"
    TF32 = "tf32"


class StatePrecision(StrEnum):
    """How states are stored."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"


class MemoryPath(StrEnum):
    """The memory objects that hold weights on the device."""

    AUTO = "auto"
    BUFFER = "buffer"
    TEXTURE = "texture"


class Mode(StrEnum):
    """How weights are transferred to the kernels."""

    vars().update({name.upper(): name for name in (AUTO, *MODES)})


AUTO_MODE = Mode(AUTO)


class ObjectiveName(StrEnum):
    """The quantity that the planner minimises: its members are those of `KINDS`."""

    vars().update({name.upper(): name for name in (AUTO, *KINDS)})


AUTO_OBJECTIVE = ObjectiveName(AUTO)


class Units(StrEnum):
    """The units of the paper's objective."""

    SHARE = "share"
    PRINTED = "printed"


class Strategy(StrEnum):
    """When weights are loaded: as planned, or by a simpler strategy."""

    STREAM = "stream"
    ON_DEMAND = "on-demand"
    ALWAYS_NEXT = "always-next"
    NEXT_OPERATOR = "next-operator"
    SAME_OP = "same-op"
    RESIDENT_FIRST = "resident-first"


class RunStrategy(StrEnum):
    """As `Strategy`, and loading everything before the first launch."""

    STREAM = "stream"
    ON_DEMAND = "on-demand"
    ALWAYS_NEXT = "always-next"
    NEXT_OPERATOR = "next-operator"
    SAME_OP = "same-op"
    RESIDENT_FIRST = "resident-first"
    PRELOAD = "preload"


class Optimize(StrEnum):
    """The answer for which kernels are selected: the first, or later ones."""

    COLD = "cold"
    STEADY = "steady"


class Disk(StrEnum):
    """Whether the weight file is in the page cache before a simulated run."""

    COLD = "cold"
    CACHED = "cached"


ModelArgument = Annotated[Path, typer.Argument(help="An .onnx model, or a bundle.", show_default=False)]
PlannedModel = Annotated[
    Path, typer.Argument(help="An .onnx model, a bundle, or zoo:NAME for a known architecture.", show_default=False)
]
Device = Annotated[str | None, typer.Option(metavar="NAME", help="A device, or 'auto'.", show_default="auto")]
Shape = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=1x128", help="Sizes of an input's open dimensions; repeatable. A repeated name begins a new variant."
    ),
]
RunStrategyOption = Annotated[
    RunStrategy | None, typer.Option(help="When weights are loaded; all but stream are baselines.", show_default="stream")
]
Build = Annotated[
    bool,
    typer.Option("--build/--no-build", help="Compile kernels now, if the device is local; if not, in the first run."),
]
HostBudget = Annotated[
    str | None,
    typer.Option(
        "--host-budget",
        metavar="SIZE|auto",
        help="Limit on host memory for staging and for weights that later runs copy; for a device with memory of its own.",
        show_default="none: no weights are kept there",
    ),
]
ProcessMemory = Annotated[
    str | None,
    typer.Option(
        "--process-memory",
        metavar="SIZE",
        help="Limit on the whole process, driver and interpreter too, in place of --budget; for instance 300MB.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead of a report.")]

BUNDLE_OPTIONS: dict[str, Any] = {
    "device": Device,
    "budget": Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Limit on all memory, on a GPU with memory of its own on that; for instance 256MB."),
    ],
    "host_budget": Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Host budget of sessions, to choose what stays on a GPU and what on the host together."
        ),
    ],
    "m_peak": Annotated[str | None, typer.Option(metavar="SIZE", help="Limit on weights in flight only, as in the paper.")],
    "lambda_": Annotated[
        float | None,
        typer.Option("--lambda", min=0.0, max=1.0, help="Latency (0) against memory (1).", show_default="0; paper: 0.9"),
    ],
    "chunk": Annotated[str | None, typer.Option(metavar="SIZE", help="Unit of transfer (S).", show_default="auto")],
    "precision": Annotated[
        Precision | None,
        typer.Option(
            help="fp16: weights and activations stored in half; sums in fp32. tf32: operands of products rounded by NVIDIA's "
            "tensor cores.",
            show_default="fp32",
        ),
    ],
    "state_precision": Annotated[
        StatePrecision | None,
        typer.Option(
            "--state-precision",
            "--kv",
            help="Stored type of states. int8: caches in 8 bits, a scale for each row; other states in half.",
            show_default="fp16 for GGUF; --precision",
        ),
    ],
    "quantize": Annotated[
        Quantize | None,
        typer.Option(help="Store float32 weights as integers with scales; int4: those of matrices, and 8 bits for others."),
    ],
    "shape": Shape,
    "constant": Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=16000", help="Fix an input: a number, or several with commas; repeatable."),
    ],
    "state": Annotated[
        list[str] | None,
        typer.Option(
            metavar="INPUT=OUTPUT|auto",
            help="Keep an output on the device as the next run's input; repeatable. auto: all pairs named past and present.",
        ),
    ],
    "max_length": Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens that the cache of a language model holds.", show_default="2048, or its context"),
    ],
    "batch": Annotated[
        int | None,
        typer.Option(metavar="N", help="Requests at a time that flashmem serve answers.", show_default="1"),
    ],
    "preload": Annotated[list[str] | None, typer.Option(metavar="WEIGHT", help="A weight to keep resident; repeatable.")],
    "memory_path": Annotated[MemoryPath | None, typer.Option(help="Memory objects for weights.", show_default="auto")],
    "mode": Annotated[Mode | None, typer.Option(help="How weights are transferred.", show_default="auto")],
    "objective": Annotated[
        ObjectiveName | None,
        typer.Option(
            help="The first answer, later runs, or the paper's weighted sum.", show_default="first; steady with states"
        ),
    ],
    "strategy": Annotated[
        Strategy | None, typer.Option(help="When weights are loaded; all but stream are baselines.", show_default="stream")
    ],
    "unfusion": Annotated[
        bool | None,
        typer.Option("--unfusion/--no-unfusion", help="Split fusion groups if the plan gains.", show_default="on"),
    ],
    "mu": Annotated[float | None, typer.Option(min=0.0, help="Weight of distance in ranking splits.", show_default="0.1")],
    "alpha": Annotated[float | None, typer.Option(min=0.0, help="Least gain in capacity for a split.", show_default="0.1")],
    "units": Annotated[
        Units | None,
        typer.Option(help="The paper's sum in shares of all chunks and layers, or in chunks and layers.", show_default="share"),
    ],
    "optimize": Annotated[
        Optimize | None, typer.Option(help="Kernels for the first answer, or for later ones.", show_default="cold")
    ],
}
"""The options that determine a bundle, by field of `CompileOptions`, in the order of --help."""


def with_bundle_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each field of `CompileOptions` to `command`, which receives them together as `options`.

    Does not add an option that the command itself declares (`run` has its own `strategy`).
    """
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "options"]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in BUNDLE_OPTIONS.items()
        if name not in signature.parameters
    ]

    @functools.wraps(command)
    def whole(**values: Any) -> None:
        options = {parameter.name: _plain(values.pop(parameter.name)) for parameter in shared}
        command(options=CompileOptions(**{name: value for name, value in options.items() if value is not None}), **values)

    parameters = [*(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own), *shared]
    whole.__dict__["__signature__"] = signature.replace(parameters=parameters)
    whole.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return whole


def _plain(value: Any) -> Any:
    """The value of an option for `CompileOptions`, with enumerations replaced by their values."""
    if isinstance(value, Enum):
        return value.value
    return tuple(value) if isinstance(value, list) else value
