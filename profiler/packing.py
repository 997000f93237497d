"""Makes a kit (`kit.py`) for another device, where the compiler is available."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flashmem.target.descriptor import DeviceDescriptor

from .bench import REFERENCE_GEMM, REFERENCE_SUM
from .cases import Made
from .kit import KitWriter, as_data
from .measure import OTHER_PATH
from .models import read_models
from .rates import CPU_GEMMS, DELAYED_GEMM, GPU_GEMMS, ONE_GROUP, TRAFFIC_ELEMENTS

KERNELS = 240
"""Number of sampled kernels in a kit: about as many as a phone measures in an hour."""


def write_kit(
    path: Path,
    descriptor: DeviceDescriptor,
    models: Sequence[Path],
    seed: int,
    progress: Callable[[str, float], None],
    *,
    kernels: int = KERNELS,
) -> Path:
    """Write a kit to measure the device of `descriptor`; returns its path.

    Raises:
        UserError: a model cannot be read or run.
    """
    default = descriptor.on_path(descriptor.memory_paths[0])
    launches = read_models(models, default)
    writer = KitWriter()
    shapes = (*(CPU_GEMMS if descriptor.kind == "cpu" else GPU_GEMMS), REFERENCE_GEMM, DELAYED_GEMM)
    paths: dict[str, Any] = {}
    for number, memory_path in enumerate(descriptor.memory_paths):
        made = Made(descriptor.on_path(memory_path))
        drawn = []
        for index in range(kernels):
            progress("kernels", (number * kernels + index) / kernels / len(descriptor.memory_paths))
            elsewhere = len(descriptor.memory_paths) > 1 and (index % OTHER_PATH == OTHER_PATH - 1) != (number == 1)
            target = None if elsewhere else made.sampled(index, seed)
            drawn.append(None if target is None else writer.add(target))
        paths[memory_path] = {
            "matmul": {"x".join(map(str, shape)): writer.add(made.matmul(*shape)) for shape in shapes},
            "elementwise": {
                str(size): writer.add(made.elementwise(size)) for size in (REFERENCE_SUM, TRAFFIC_ELEMENTS, ONE_GROUP)
            },
            "sampled": drawn,
        }
    with tempfile.TemporaryDirectory(prefix="flashmem-kit-") as name:
        folder = Path(name)
        openings = Made(default).openings(folder, default.modes[default.memory_paths[0]][0])
        held = as_data(openings, folder)
        writer.add_folder(folder, held["bundles"].values())
    writer.finish(
        path,
        {
            "descriptor": descriptor.portable.to_dict(),
            "seed": seed,
            "paths": paths,
            "models": [[writer.add(target) for target in each] for each in launches],
            "openings": held,
        },
    )
    return path
