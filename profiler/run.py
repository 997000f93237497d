"""`flashmem profile`: measure a device, train on what was measured, and write the device's files.

A later call takes up where an earlier one was killed (`measure.py`). Measuring and training may be done on two machines: a
phone writes the dataset, which says enough of the device to train and to write its descriptor elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashmem.base.errors import UserError
from flashmem.planning.capacity.basis import Basis
from flashmem.runtime.opencl.context import find_device
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.target.descriptor import DeviceDescriptor

from .dataset import SAMPLE, SUFFIX, at_usual_pace, read_dataset
from .descriptor import write_descriptor
from .measure import Progress, measure
from .measure import Request as Request
from .models import read_models
from .train import save, train


def profile(request: Request, progress: Progress) -> Path:
    """Profile a device and write NAME.toml, NAME.seconds.ubj, NAME.slowdown.ubj and NAME.profile.csv.gz into `output`.

    Returns the descriptor's path. `progress(stage, fraction)` is called as it goes on.

    Raises:
        NoDeviceError: no such device.
        UserError: a model cannot be profiled, an interrupted profile of something else is in the way, or the time was too
            short to train.
        RunError: the device fails.
    """
    device = find_device(request.device)
    descriptor = descriptor_for(device)
    name = request.name or descriptor.name
    if request.models:
        progress("models", 0.0)
    models = read_models(request.models, descriptor.on_path(descriptor.memory_paths[0]))
    found = measure(request, device, descriptor, models, progress)
    progress("train", 1.0)
    predictor = train(at_usual_pace(found.growing.rows, found.basis), found.basis)
    found.write(request.output, name)
    save(predictor, request.output / name)
    measured = replace(found.descriptor, name=name, capacity_model=name)
    path = write_descriptor(request.output, measured, found.source, device.kind)
    found.done()
    return path


def retrain(dataset: Path, without: Sequence[str] = ()) -> Path:
    """Train anew on a finished dataset and write the models beside it, and the descriptor where the dataset has it and there is
    none; no device is needed.

    Returns the models' stem, or the path of the descriptor that was written.

    `without`: models whose launches training is not to see, so that `flashmem profile --report` can judge by them.

    Raises:
        UserError: not a dataset, or it has no launches of such a model.
    """
    about, rows = read_dataset(dataset)
    if unknown := sorted(set(without) - ({row.origin for row in rows} - {SAMPLE})):
        known = ", ".join(sorted({row.origin for row in rows} - {SAMPLE})) or "none"
        raise UserError(f"{dataset} has no launches of a model {unknown[0]!r}; the models in it: {known}")
    basis = basis_of(about)
    stem = dataset.with_name(dataset.name.removesuffix(SUFFIX))
    paced = at_usual_pace(rows, basis)
    held = {row.features for row in paced if row.origin in without}
    save(train([row for row in paced if row.features not in held], basis), stem)
    if "descriptor" not in about or stem.with_name(f"{stem.name}.toml").exists():
        return stem
    descriptor = DeviceDescriptor.from_dict(about["descriptor"], where=str(dataset))
    measured = replace(descriptor, name=stem.name, capacity_model=stem.name)
    return write_descriptor(dataset.parent, measured, str(about["source"]), descriptor.kind)


def basis_of(about: dict[str, Any]) -> Basis:
    """The basis that a dataset's first line holds.

    Raises:
        UserError: it holds none of this version.
    """
    try:
        return Basis(**about["basis"])
    except (KeyError, TypeError) as error:
        raise UserError(f"the dataset is not of this version ({error!r}); profile the device again") from error
