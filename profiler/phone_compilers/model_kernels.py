"""The distinct kernels of the zoo's models for a device, as OpenCL C: from their configurations, without a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashmem.base.errors import UserError
from flashmem.profiler.cases import Precision, targets_of
from flashmem.program.kernel_text import kernel_texts
from flashmem.target.descriptor import DeviceDescriptor
from flashmem.tools.zoo.graphs import zoo_graph

MODELS = (
    "resnet50", "mobilenetv2", "mobilenetv3-large", "vit-b16", "vit-103m", "deepvit-204m", "gptneo-125m", "gptneo-1.3b",
    "gptneo-2.7b", "gpt2", "opt-125m", "whisper-tiny-encoder", "whisper-medium-encoder", "llama2-13b",
)  # fmt: skip
"""The zoo's configurations, without the two of 70 and 8 billion parameters, whose layers are as those of smaller ones."""

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16")


@dataclass(frozen=True)
class ModelKernel:
    """One kernel of one model: the number of its launches, the multiply-adds of all of them, and `text`, a key of
    `ModelKernels.texts`.
    """

    model: str
    precision: Precision
    kernel: str
    family: str
    launches: int
    macs: int
    text: str


@dataclass(frozen=True)
class ModelKernels:
    """The kernels of models for the device called `device`. `texts` are OpenCL C by hash; models share many."""

    device: str
    kernels: tuple[ModelKernel, ...]
    texts: dict[str, str]

    @classmethod
    def rendered(cls, models: Sequence[str], descriptor: DeviceDescriptor) -> ModelKernels:
        """The kernels of `models`, in fp32 and fp16, as `flashmem compile --device` writes them.

        Raises:
            UserError: the zoo has no configuration of a model.
        """
        kernels: list[ModelKernel] = []
        texts: dict[str, str] = {}
        for model in models:
            for precision in PRECISIONS:
                found, more = _kernels_of(model, precision, descriptor)
                kernels += found
                texts |= more
        return cls(descriptor.name, tuple(kernels), texts)

    @classmethod
    def read(cls, path: Path) -> ModelKernels:
        """What `write` has written.

        Raises:
            UserError: the file is missing, or has something else.
        """
        try:
            data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return cls(data["device"], tuple(ModelKernel(**each) for each in data["kernels"]), data["texts"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} has no kernels of models ({error}); write it with --write-kernels") from error

    def write(self, path: Path) -> None:
        """Write the kernels as JSON: another version of flashmem can compile them, with the same compiler."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def _kernels_of(model: str, precision: Precision, descriptor: DeviceDescriptor) -> tuple[Iterable[ModelKernel], dict[str, str]]:
    targets = targets_of(zoo_graph(model), descriptor, precision, model, model)
    texts = kernel_texts(targets[0].source.plain)
    keys = {kernel: hashlib.sha256(text.encode()).hexdigest()[:16] for kernel, text in texts.items()}
    found: dict[str, ModelKernel] = {}
    for launch in (target.launch for target in targets):
        before = found.get(launch.kernel)
        launches, macs = (before.launches, before.macs) if before else (0, 0)
        found[launch.kernel] = ModelKernel(
            model, precision, launch.kernel, launch.shape.family, launches + 1, macs + launch.macs, keys[launch.kernel]
        )
    return found.values(), {keys[kernel]: texts[kernel] for kernel in found}
