"""The GPUs that Mesa's compilers support, and the name of each in Mesa."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashmem.base.errors import UserError


@dataclass(frozen=True)
class Gpu:
    """A GPU whose compiler Debian packages.

    `driver` is Mesa's name, `architecture` the Debian architecture that has this driver, and `environment` makes the driver
    compile for the GPU and print its code. `descriptors` are the device descriptors of GPUs with the same core.
    """

    name: str
    driver: Literal["freedreno", "panfrost"]
    architecture: Literal["amd64", "arm64"]
    environment: tuple[tuple[str, str], ...]
    descriptors: tuple[str, ...] = ()


def _adreno(number: int, *descriptors: str) -> Gpu:
    environment = (("FD_GPU_ID", str(number)), ("IR3_SHADER_DEBUG", "cs"))
    return Gpu(f"adreno{number}", "freedreno", "amd64", environment, descriptors)


def _mali(name: str, number: str, *descriptors: str) -> Gpu:
    environment = (("PAN_GPU_ID", number), ("BIFROST_MESA_DEBUG", "shaders,shaderdb"))
    return Gpu(f"mali-{name}", "panfrost", "arm64", environment, descriptors)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _adreno(630),
        _adreno(730, "adreno730"),
        _adreno(740, "adreno740"),
        _adreno(750, "adreno750"),
        _adreno(830, "adreno830"),
        _mali("g610", "a867:0", "mali-g710", "mali-g715"),  # Mali-G610 has the core of the G710; no driver supports the G715's
        _mali("g720", "c870:4", "mali-g720"),
        _mali("g725", "d830:4"),
    )
}
"""The GPUs by name."""


def gpu_of(name: str) -> Gpu:
    """The GPU called `name`, or the one with the core of the device descriptor of this name.

    Raises:
        UserError: no GPU has that name.
    """
    found = GPUS.get(name) or next((gpu for gpu in GPUS.values() if name in gpu.descriptors), None)
    if found is None:
        raise UserError(f"there is no open compiler for {name!r}; name one of: {', '.join(GPUS)}")
    return found
