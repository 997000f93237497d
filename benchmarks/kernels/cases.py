"""Shapes that `benchmarks.kernels.operators` measures, by model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from flashmem.base.types import Precision
from flashmem.profiler.shapes import Attention, Convolution, Matmul, Shape, unet_shapes, zoo_shapes
from flashmem.target.descriptor import DeviceDescriptor

from .cliffs import Single, cliffs, low_bits
from .decoding import Decode, decoding

REFERENCE = "reference"
ATTENTION = "attention"
CLIFFS = "cliffs"
LOW_BITS = "low bits"
DECODING = "decode attention"
TENSOR_CORES = "tensor cores"
TENSOR_CONVOLUTIONS = "convolutions by tensor cores"
TENSOR_ATTENTION = "attention by tensor cores"
TF32_PRODUCTS = "products in tf32"
TF32_CONVOLUTIONS = "convolutions in tf32"
LOW_PRECISION: Mapping[str, Precision] = {
    TENSOR_CORES: "fp16", TENSOR_CONVOLUTIONS: "fp16", TENSOR_ATTENTION: "fp16",
    TF32_PRODUCTS: "tf32", TF32_CONVOLUTIONS: "tf32",
}  # fmt: skip
"""Groups that tensor cores compute, with the precision of both sides. Operands and results of "fp16" are halves."""

MODELS = ("gptneo-125m", "gptneo-1.3b", "vit-b16", "sd-unet", "whisper-medium-encoder", "resnet50")

_REFERENCE: tuple[Shape, ...] = (
    Matmul(4096, 4096, 4096), Matmul(1024, 1024, 4096), Matmul(197, 768, 3072), Matmul(128, 768, 3072), Matmul(128, 2048, 8192),
)  # fmt: skip
_ATTENTION: tuple[Shape, ...] = (
    Attention(12, 197, 64), Attention(12, 128, 64), Attention(8, 4096, 40), Attention(20, 1500, 64),
)  # fmt: skip
_DECODERS: tuple[Shape, ...] = (  # prompts of Llama-like decoders
    Attention(32, 2048, 64, causal=True), Attention(32, 2048, 128), Attention(32, 2048, 128, causal=True),
)  # fmt: skip
_SAM2: tuple[Shape, ...] = (  # Hiera tiny, 1024 pixels: windows, as batches of heads, and one global
    Attention(100, 196, 96), Attention(4, 4096, 96), Attention(1024, 64, 96), Attention(200, 49, 96),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A shape, the group of its ratio, and how often it occurs in one run of the model."""

    group: str
    shape: Shape | Single | Decode
    count: int = 1


def cases(descriptor: DeviceDescriptor) -> list[Case]:
    """The cases for a device: the table's shapes, then one of each group in turn, so that no group is missed.

    The operators of `cliffs` follow, and on a GPU those of `low_bits`, products, convolutions and attention again in half,
    products and convolutions in TF32, and the attention of `decoding`.
    """
    models, others = _of_models(descriptor.kind), [Case(CLIFFS, each) for each in cliffs()]
    if descriptor.kind == "gpu":
        others += [Case(LOW_BITS, each) for each in low_bits()]
        largest, *_ = _REFERENCE
        of_models = dict.fromkeys(case.shape for case in models if case.group != REFERENCE)
        products = [largest, *(shape for shape in of_models if isinstance(shape, Matmul))]
        convolutions = [shape for shape in of_models if isinstance(shape, Convolution)]
        groups: dict[str, Sequence[Shape]] = {
            TENSOR_CORES: products, TENSOR_CONVOLUTIONS: convolutions, TENSOR_ATTENTION: (*_ATTENTION, *_DECODERS),
            TF32_PRODUCTS: products, TF32_CONVOLUTIONS: convolutions,
        }  # fmt: skip
        others += [Case(group, shape) for group, shapes in groups.items() for shape in shapes]
        others += [Case(DECODING, each) for each in decoding(descriptor)]
    return [*models, *others]


def _of_models(kind: str) -> list[Case]:
    attention = _ATTENTION if kind == "gpu" else _SAM2
    groups = [[Case(ATTENTION, shape) for shape in attention]]
    for model in MODELS:
        found = _of_model(model)
        convolutions = model == "resnet50"
        groups.append([case for case in found if isinstance(case.shape, Convolution) == convolutions])
    reference = [Case(REFERENCE, shape) for shape in _REFERENCE]
    if kind == "cpu":  # where the largest takes as long as all others together
        return [*reference[1:], *_in_turn(groups), reference[0]]
    return [*reference, *_in_turn(groups)]


def _of_model(name: str) -> list[Case]:
    if name == "sd-unet":
        return [Case(name, shape) for shape in unet_shapes()]
    return [Case(name, shape, count) for shape, count in zoo_shapes(name).items()]


def _in_turn(groups: Iterable[list[Case]]) -> Iterator[Case]:
    for row in zip_longest(*groups):
        yield from (case for case in row if case is not None)
