"""Select the capacity model of a descriptor: the trained predictor or compiled code if it names one, else the roofline."""

from __future__ import annotations

from pathlib import Path

from flashmem.base.resources import names
from flashmem.base.types import MemoryPath
from flashmem.planning.capacity.compiled import CODE, CompiledCode
from flashmem.planning.capacity.model import SECONDS, CapacityModel
from flashmem.planning.capacity.roofline import Roofline
from flashmem.target.descriptor import DeviceDescriptor


def default_model(descriptor: DeviceDescriptor, memory_path: MemoryPath) -> CapacityModel:
    """The model that the descriptor names, trained or from compiled code, or the roofline with the reason in its note.

    Raises:
        UserError: the descriptor names a model that is missing or is not one of flashmem.
    """
    name = descriptor.capacity_model
    if not name:
        return Roofline(descriptor)
    beside = Path(name).is_absolute() and Path(f"{name}{CODE}").is_file()
    if beside or (descriptor.pipelines is not None and Path(name).name in names("devices", CODE)):
        return CompiledCode.load(descriptor, memory_path)
    if not Path(name).is_absolute() and name not in names("devices", SECONDS):  # the bundle is from another machine
        return Roofline(descriptor, f"the trained model {name} is not here")
    try:
        from flashmem.planning.capacity.predictor import Predictor  # imports xgboost only when it is needed
    except ImportError:
        return Roofline(descriptor, "xgboost is not installed; install flashmem[compile]")
    return Predictor.load(name, memory_path).at(descriptor.rates, descriptor.modes[memory_path][0])
