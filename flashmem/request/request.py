"""What a user asks of a bundle: `BundleRequest` has every option that determines one, besides its model.

The keywords in Python, the command line, the words for a child process and the name in the cache follow from these fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from flashmem.base.errors import UserError
from flashmem.base.types import MemoryPath, Optimize, Precision, Quantize, StatePrecision, States, TransferMode
from flashmem.base.units import read_constants, read_states
from flashmem.bundle.shape_variants import Shape, Shapes, checked_variants, read_variants
from flashmem.request.description import Converted, argument, choice, option
from flashmem.request.kinds import File, Flag, Kind, Numeric, Parsed
from flashmem.request.limits import Limits
from flashmem.schedule.modes import MODES

if TYPE_CHECKING:
    import onnx

TARGET = "Device"
MODEL = "Model"
NUMBERS = "Numbers"
"""Headings in help."""


def _numbers(constants: Mapping[str, Any]) -> dict[str, Any]:
    """Constants as numbers and nested lists. Raises UserError."""
    try:
        return {name: np.asarray(value).tolist() for name, value in constants.items()}
    except ValueError:
        raise UserError("a constant has rows of different lengths; give an array, or numbers in its shape") from None


def _pairs(values: Mapping[str, Any] | str) -> list[str]:
    """`auto`, or values by name as the words NAME=VALUE, a list with commas."""
    if isinstance(values, str):
        return [values]
    return [f"{name}={','.join(map(str, value)) if isinstance(value, list) else value}" for name, value in values.items()]


def _words_of(variants: Sequence[Shapes]) -> list[str]:
    """Shape variants as words; the inverse of `read_variants`."""
    return [f"{name}={'x'.join(map(str, shape))}" for each in variants for name, shape in each.items()]


class BundleRequest(Limits):
    """What determines a bundle, besides its model."""

    device: str = option(
        "A device, or 'auto'.",
        default="auto",
        kind=Kind("NAME"),
        doc='"auto", part of the name of a local device, or the name or file of a descriptor.',
        scope="both",
        group=TARGET,
    )
    memory_path: MemoryPath | Literal["auto"] = option(
        "Memory objects for weights.",
        default="auto",
        kind=choice((MemoryPath, "auto")),
        doc='the memory objects that kernels read weights from; "auto" selects the device\'s first path.',
        group=TARGET,
    )
    mode: TransferMode = option(
        "How weights are transferred.",
        default="auto",
        kind=choice(("auto", MODES)),
        doc="the transfer mode of weights; \"auto\" selects the mode of a bundle's plan, else the device's first mode on the "
        "path.",
        what="transfer mode",
        scope="both",
        group=TARGET,
    )
    optimize: Optimize = option(
        "Kernels for the first answer, or for later ones.",
        default="cold",
        kind=choice(Optimize),
        doc='select kernels for the first answer ("cold": building and loading count too) or for later ones ("steady").',
        group=TARGET,
    )
    precision: Precision = option(
        "fp16: weights and activations stored in half; sums in fp32. tf32: operands of products rounded by NVIDIA's tensor "
        "cores.",
        default="fp32",
        kind=choice(Precision),
        doc='the stored type of weights and activations; sums are fp32. "tf32": they are stored in fp32, and NVIDIA\'s tensor '
        "cores round the operands of products with weights and of convolutions to 10 bits of mantissa.",
        group=NUMBERS,
    )
    state_precision: StatePrecision | None = option(
        "Stored type of states. int8: caches in 8 bits, a scale for each row; other states in half.",
        default=None,
        kind=choice(StatePrecision),
        doc='the stored type of states, by default fp16 for a GGUF file, and `precision` for others. "int8": caches of keys '
        "and values in 8 bits, with a float32 scale for each row of a head, and other states in half.",
        shown="fp16 for GGUF; --precision",
        flags=("--state-precision", "--kv"),
        group=NUMBERS,
    )
    quantize: Quantize | None = option(
        "Store float32 weights as integers with scales; int4: those of matrices, and 8 bits for others.",
        default=None,
        kind=choice(Quantize),
        doc='store float32 weights of products and tables as integers with scales: "int4" or "int8". `Bundle.meta` has the '
        "error of each as `quantised` (`flashmem.compiler.frontend.quantize`).",
        group=NUMBERS,
    )
    shapes: Converted[Shapes | Sequence[Shapes] | None, tuple[Mapping[str, Shape], ...]] = option(
        "Sizes of an input's open dimensions; repeatable. A repeated name begins a new variant.",
        default=({},),
        kind=Parsed("NAME=1x128", read_variants, checked_variants, _words_of),
        doc="sizes for open dimensions, by input. Or several of these, for a bundle with one shape variant each and common "
        "weights. A session then runs the variant whose shapes its inputs have.",
        flags=("--shape",),
        group=MODEL,
    )
    constants: Converted[Mapping[str, Any] | None, Mapping[str, Any]] = option(
        "Fix an input: a number, or several with commas; repeatable.",
        default={},
        kind=Parsed("NAME=16000", read_constants, _numbers, _pairs),
        doc="values of inputs that never change, numbers or arrays by name. The bundle has no such inputs, and branches on "
        "them are folded.",
        flags=("--constant",),
        group=MODEL,
    )
    states: States | None = option(
        "Keep an output on the device as the next run's input; repeatable. auto: all pairs named past and present.",
        default=None,
        kind=Parsed(
            "INPUT=OUTPUT|auto",
            read_states,
            lambda given: given if isinstance(given, str) else dict(given),
            _pairs,
        ),
        doc='inputs that the next run reads as outputs of this one, input name to output name; "auto": all pairs that are '
        "named past and present. A session keeps them on the device, and neither takes nor returns them.",
        flags=("--state",),
        group=MODEL,
    )
    max_length: int | None = option(
        "Tokens that the cache of a language model holds.",
        default=None,
        kind=Numeric("N"),
        doc="of a language model: tokens that its cache holds, by default 2,048 or the model's context.",
        shown="2048, or its context",
        group=MODEL,
    )
    batch: Converted[int | None, int] = option(
        "Requests at a time that flashmem serve answers.",
        default=1,
        kind=Numeric("N"),
        doc="of a language model: requests that `BatchGenerator` answers at a time, each with a cache of its own; 1 by "
        "default, for `Generator`.",
        group=MODEL,
    )

    @property
    def of_bundle(self) -> BundleRequest:
        """What a model is compiled for."""
        return self.given_as(BundleRequest)

    @property
    def fixed(self) -> tuple[str, ...]:
        """The fields that were given, and are fixed once a bundle is compiled."""
        known = BundleRequest.options.keys() & self.given.keys()
        return tuple(name for name in self.given if name in known and self.options[name].scope == "compile")

    @property
    def resolved_state_precision(self) -> StatePrecision:
        """The named stored type of states, or the one that follows from `precision`."""
        return self.state_precision or ("fp32" if self.precision == "tf32" else self.precision)


class CompileCall(BundleRequest):
    """A call of `flashmem.compile`: the request, the model, and what else happens."""

    asker = "flashmem.compile"

    model: str | Path | bytes | onnx.ModelProto = argument(
        "An .onnx model, or a language model: a .gguf file or a folder.",
        kw_only=False,
        kind=Kind("MODEL"),
        doc="an ONNX file, its bytes or an `onnx.ModelProto` (both with all weights inside); or a language model, whose shapes "
        "and states are known: a GGUF file, or a folder of onnxruntime-genai, optimum or transformers.js.",
    )
    output: Converted[str | Path | None, Path | None] = argument(
        "The bundle; default: in the user's cache.",
        kw_only=False,
        default=None,
        kind=File("model.flashmem"),
        flags=("-o", "--output"),
        doc="the bundle's folder (`model.flashmem`). None keeps it in the user's cache, where an equal call finds it again. If "
        "the cache cannot be written, it is kept until the process ends, with a warning.",
    )
    build: bool = option(
        "Compile kernels now, if the device is local; if not, in the first run.",
        default=True,
        kind=Flag(no=""),
        doc="if the device is local, compile the kernels into the program cache, so that the first run compiles nothing.",
    )
    with_binaries: bool = option(
        "Store the compiled kernels in the bundle, for equal devices only.",
        default=False,
        doc="also store the compiled kernels in the bundle, for exactly equal devices and drivers.",
    )
    dump_stages: Converted[str | Path | None, Path | None] = option(
        "Write the result of each stage of the compiler as text to this folder: graphs, fusion groups, program, plan.",
        default=None,
        kind=File("DIR"),
        doc="a folder for the result of each stage of the compiler as text, from the imported graph to the weight file; for "
        "several shape variants, with one subfolder each.",
    )
    progress: Callable[[str, float], None] | None = option(
        None, default=None, kind=Kind(), doc="called with a stage and the fraction done."
    )
