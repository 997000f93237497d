"""Command line options for typer: those that several commands share, and the group that determines a bundle."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from flashmem.request.description import Option
from flashmem.request.kinds import Choice, Flag
from flashmem.request.request import Request


class Mode(StrEnum):
    """How weights are transferred to the kernels."""

    AUTO = "auto"
    MAP = "map"
    ALIAS = "alias"
    DMA = "dma"
    INTERLEAVE = "interleave"


class Objective(StrEnum):
    """The quantity that the planner minimises."""

    AUTO = "auto"
    FIRST = "first"
    STEADY = "steady"
    PAPER = "paper"


class RunStrategy(StrEnum):
    """As `Strategy`, and loading everything before the first launch."""

    STREAM = "stream"
    ON_DEMAND = "on-demand"
    ALWAYS_NEXT = "always-next"
    NEXT_OPERATOR = "next-operator"
    SAME_OP = "same-op"
    RESIDENT_FIRST = "resident-first"
    PRELOAD = "preload"


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


def with_bundle_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `Request` to `command`, which receives them together as `options`.

    Does not add an option that the command itself declares (`run` has its own `strategy`).
    """
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "options"]
    shared = {name: each for name, each in Request.options.items() if name not in signature.parameters}

    @functools.wraps(command)
    def whole(**values: Any) -> None:
        given = {name: value for name in shared if (value := values.pop(name)) not in (None, [])}
        request = Request(**{name: shared[name].kind.read(value, shared[name].what) for name, value in given.items()})
        command(options=request, **values)

    parameters = [
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own),
        *(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(each))
            for name, each in shared.items()
        ),
    ]
    whole.__dict__["__signature__"] = signature.replace(parameters=parameters)
    whole.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return whole


def _annotation(option: Option) -> Any:
    """The option as typer declares one."""
    if isinstance(option.kind, Flag):
        flags = f"{option.flags[0]}/{option.opposite}" if option.opposite else option.flags[0]
        return Annotated[bool | None, typer.Option(flags, help=option.help, show_default=False)]
    metavar = f"[{'|'.join(option.kind.words)}]" if isinstance(option.kind, Choice) else option.kind.metavar
    shown = option.shown or (False if option.default in (None, ()) else str(option.default))
    form: Any = list[str] if option.kind.repeats else str
    return Annotated[form | None, typer.Option(*option.flags, metavar=metavar, help=option.help, show_default=shown)]
