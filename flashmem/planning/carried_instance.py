"""The planning instance that a bundle carries, so that it can be planned again on the device: layer times and slowdowns.

The predictors of these times stay in the offline half. The bundle's `meta` contains their results: the class, the seconds and
s_l (`LayerSpec.beside`) of each layer, the last two stored once for identical layers. C_l and S are those of the bundle's plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from flashmem.base.errors import BundleError
from flashmem.base.types import OperatorClass, TransferMode
from flashmem.planning.pose import pose
from flashmem.program.program import Program
from flashmem.schedule.instance import Instance, LayerSpec
from flashmem.schedule.plan import OverlapPlan
from flashmem.target.descriptor import DeviceDescriptor

KEY = "layers"
"""The key of these times in a bundle's `meta`."""


def carried(instance: Instance) -> dict[str, Any]:
    """The times of `instance` as values that JSON can represent."""
    numbers: dict[tuple[float, tuple[tuple[float, float], ...]], int] = {}
    of = [numbers.setdefault((spec.seconds, spec.beside), len(numbers)) for spec in instance.layers]
    classes = [spec.operator_class for spec in instance.layers]
    return {
        "times": [[seconds, [list(point) for point in beside]] for seconds, beside in numbers],
        "of": of,
        "classes": classes,
    }


def carried_instance(
    program: Program, plan: OverlapPlan, descriptor: DeviceDescriptor, mode: TransferMode, meta: Mapping[str, Any]
) -> Instance | None:
    """The planning problem of a bundle's `program` on its device, without a memory limit. None if its `meta` has no times.

    Times that `run --learn` measured in `mode` replace predicted ones.

    Raises:
        BundleError: the stored times are malformed.
    """
    if KEY not in meta:
        return None
    try:
        times = [(float(seconds), tuple((float(x), float(y)) for x, y in beside)) for seconds, beside in meta[KEY]["times"]]
        of = [times[int(index)] for index in meta[KEY]["of"]]
        learned = meta.get("learned") or {}
        if learned.get("mode") == mode and len(learned.get("seconds", ())) == len(of):
            of = [(float(seconds), beside) for seconds, (_, beside) in zip(learned["seconds"], of, strict=True)]
        classes = meta[KEY].get("classes") or [launch.operator_class for launch in program.launches]
        if not set(classes) <= set(get_args(OperatorClass)):
            raise ValueError("a class of launches has no such name")
        layers = [
            LayerSpec(launch.name, kind, capacity, seconds, beside)
            for launch, kind, capacity, (seconds, beside) in zip(program.launches, classes, plan.capacities, of, strict=True)
        ]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise BundleError(f"the bundle's times of layers are damaged ({error}); compile the model again") from error
    total = sum(part.nbytes for part in program.slices)
    return pose(program, layers, descriptor, mode, chunk_bytes=plan.chunk_bytes, m_peak=max(1, 2 * total))
