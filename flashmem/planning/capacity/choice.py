"""Select the capacity model of a descriptor: the trained models that it names, else the roofline."""

from __future__ import annotations

from pathlib import Path

from flashmem.base.resources import names
from flashmem.base.types import MemoryPath
from flashmem.planning.capacity.family import ATTRIBUTE, load_family
from flashmem.planning.capacity.model import SECONDS, CapacityModel
from flashmem.planning.capacity.predictor import Predictor, load_trees
from flashmem.planning.capacity.roofline import Roofline
from flashmem.target.descriptor import DeviceDescriptor


def default_model(descriptor: DeviceDescriptor, memory_path: MemoryPath) -> CapacityModel:
    """The model that the descriptor names, of measurements or of a family, or the roofline with the reason in its note.

    Raises:
        UserError: the descriptor names a model that is missing or is not one of flashmem.
    """
    name = descriptor.capacity_model
    if not name:
        return Roofline(descriptor)
    if not Path(f"{name}{SECONDS}").is_file() and descriptor.pipelines is not None:
        name = Path(name).name  # a copy of a shipped descriptor names the shipped models of its family
    if not Path(name).is_absolute() and name not in names("devices", SECONDS):  # the bundle is from another machine
        return Roofline(descriptor, f"the trained model {name} is not here")
    if ATTRIBUTE in load_trees(name, SECONDS).attributes:
        return load_family(name, descriptor, memory_path)
    return Predictor.load(name, memory_path).at(descriptor.rates, descriptor.modes[memory_path][0])
