"""The GPU families of phones, of which each has its own boosters, and the kernels that are compiled to train them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashmem.profiler.cases import sampled, targets_of
from flashmem.profiler.phone_compilers.gpus import GPUS, Gpu
from flashmem.profiler.target import Target
from flashmem.target.descriptor import load_descriptor
from flashmem.tools.zoo.graphs import zoo_graph

MODELS = ("gptneo-125m", "resnet50", "mobilenetv2", "vit-b16", "whisper-tiny-encoder")
"""Models whose kernels are compiled in addition to sampled ones."""


@dataclass(frozen=True)
class Family:
    """A family: `gpu` names the compiler, `writes` the descriptor for which kernels are written.

    `devices` are the shipped descriptors whose facts are those of real GPUs in training; `held` is the one to hold out, if
    there are several.
    `samples`: how many kernels are drawn; `precisions`: of models.
    """

    name: str
    gpu: str
    writes: str
    devices: tuple[str, ...]
    held: str = ""
    samples: int = 180
    precisions: tuple[str, ...] = ("fp32", "fp16")
    models: tuple[str, ...] = MODELS

    @property
    def compiler(self) -> Gpu:
        """The GPU whose compiler builds the kernels."""
        return GPUS[self.gpu]

    def targets(self) -> Iterator[Target]:
        """The launches to compile: sampled ones, then those of models. Equal launches of a model come once."""
        descriptor = load_descriptor(self.writes)
        for index in range(self.samples):
            found = sampled(index, 0, descriptor)
            if found is not None:
                yield found
        for model in self.models:
            graph = zoo_graph(model)
            for precision in self.precisions:
                seen = set()
                for target in targets_of(graph, descriptor, precision, model, f"{model}-{precision}"):  # type: ignore[arg-type]
                    key = target.launch.kernel, target.launch.shape, target.launch.global_size
                    if key not in seen:
                        seen.add(key)
                        yield target


FAMILIES = {
    family.name: family
    for family in (
        Family("adreno6xx", "adreno630", "adreno540", ("adreno540",), samples=100, precisions=("fp16",)),
        Family("adreno7xx", "adreno750", "adreno750", ("adreno730", "adreno740", "adreno750"), held="adreno740"),
        Family("adreno8xx", "adreno830", "adreno830", ("adreno830",), samples=100, precisions=("fp16",)),
        Family(
            "mali-valhall", "mali-g610", "mali-g715", ("mali-g710", "mali-g715", "mali-g720"), held="mali-g720",
            samples=60, precisions=("fp32",), models=("gptneo-125m", "resnet50", "vit-b16"),
        ),
    )
}  # fmt: skip
"""The families by name. No open compiler builds OpenCL C for Adreno 5xx: rusticl has no device there. Its instructions
are those of 6xx."""
