"""What a bundle carries so that it can be planned again where it runs: how long its layers take, and what slows them down.

The predictors that know this stay in the offline half. The bundle has their answers in its `meta`: seconds of each layer, and
s_l (`LayerSpec.beside`), both once for all layers that are alike. C_l and S are those of the plan it carries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashmem.base.errors import BundleError
from flashmem.base.types import TransferMode
from flashmem.planning.pose import pose
from flashmem.program.program import Program
from flashmem.schedule.instance import Instance, LayerSpec
from flashmem.schedule.plan import OverlapPlan
from flashmem.target.descriptor import DeviceDescriptor

KEY = "layers"
"""Where a bundle's `meta` holds it."""


def carried(instance: Instance) -> dict[str, Any]:
    """The times of `instance` as JSON-able values."""
    numbers: dict[tuple[float, tuple[tuple[float, float], ...]], int] = {}
    of = [numbers.setdefault((spec.seconds, spec.beside), len(numbers)) for spec in instance.layers]
    return {"times": [[seconds, [list(point) for point in beside]] for seconds, beside in numbers], "of": of}


def carried_instance(
    program: Program, plan: OverlapPlan, descriptor: DeviceDescriptor, mode: TransferMode, meta: Mapping[str, Any]
) -> Instance | None:
    """The problem that a bundle's `program` poses on its device, without a limit on memory; None where its `meta` has no times.

    What `run --learn` measured in `mode` takes the place of what was predicted.

    Raises:
        BundleError: what is there is not what was written.
    """
    if KEY not in meta:
        return None
    try:
        times = [(float(seconds), tuple((float(x), float(y)) for x, y in beside)) for seconds, beside in meta[KEY]["times"]]
        of = [times[int(index)] for index in meta[KEY]["of"]]
        learned = meta.get("learned") or {}
        if learned.get("mode") == mode and len(learned.get("seconds", ())) == len(of):
            of = [(float(seconds), beside) for seconds, (_, beside) in zip(learned["seconds"], of, strict=True)]
        layers = [
            LayerSpec(launch.name, launch.operator_class, capacity, seconds, beside)
            for launch, capacity, (seconds, beside) in zip(program.launches, plan.capacities, of, strict=True)
        ]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise BundleError(f"the bundle's times of layers are damaged ({error}); compile the model again") from error
    total = sum(part.nbytes for part in program.slices)
    return pose(program, layers, descriptor, mode, chunk_bytes=plan.chunk_bytes, m_peak=max(1, 2 * total))
