"""`flashmem profile`: measure a device, train on the results, and write the device's files.

A later call resumes where an earlier one was killed (`measure.py`). Two machines may share the work: a phone writes the
dataset, which contains enough to train and to write the phone's descriptor elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashmem.base.errors import UserError
from flashmem.planning.capacity.basis import Basis
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import find_device
from flashmem.runtime.opencl.probes import passed_probes, results
from flashmem.target.descriptor import DeviceDescriptor

from .dataset import SAMPLE, Row, at_usual_pace, is_record, probes_in_record, read_dataset, stem_of
from .descriptor import write_descriptor
from .measure import LEAST_LAUNCHES, Progress, measure
from .measure import ProfileRequest as ProfileRequest
from .models import read_models
from .train import save, train


def profile(request: ProfileRequest, progress: Progress) -> Path:
    """Profile a device and write NAME.toml, NAME.seconds.ubj, NAME.slowdown.ubj and NAME.profile.csv.gz into `output`.

    Returns the descriptor's path. `progress(stage, fraction)` is called during the profile.

    Raises:
        NoDeviceError: no such device.
        UserError: a model cannot be profiled, an interrupted profile of another device or seed exists, or the time was too
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
    measured = replace(found.descriptor, name=name, capacity_model=name, pipelines=None)
    path = write_descriptor(request.output, measured, found.source, device.kind)
    found.done()
    return path


def retrain(dataset: Path, without: Sequence[str] = ()) -> Path:
    """Train again on a finished dataset and write the models next to it; no device is needed.

    If the dataset contains the descriptor and none exists, it is written too. Returns the models' stem, or the path of the
    written descriptor. The record of a phone kit with too few launches gives a descriptor with measured rates and no models.
    Extensions whose probes passed on the phone are in the descriptor (`DeviceDescriptor.probed`).

    `without`: models whose launches are excluded from training, so that `flashmem profile --report` can evaluate on them.

    Raises:
        UserError: not a dataset, or it has no launches of such a model.
    """
    about, rows = read_dataset(dataset)
    if unknown := sorted(set(without) - ({row.origin for row in rows} - {SAMPLE})):
        known = ", ".join(sorted({row.origin for row in rows} - {SAMPLE})) or "none"
        raise UserError(f"{dataset} has no launches of a model {unknown[0]!r}; the models in it: {known}")
    basis = basis_of(about)
    stem = stem_of(dataset)
    paced = at_usual_pace(rows, basis)
    held = {row.features for row in paced if row.origin in without}
    untrained = is_record(dataset) and not _enough(rows)
    if not untrained:
        save(train([row for row in paced if row.features not in held], basis), stem)
    if "descriptor" not in about or stem.with_name(f"{stem.name}.toml").exists():
        return stem
    descriptor = DeviceDescriptor.from_dict(about["descriptor"], where=str(dataset))
    measured = replace(descriptor, name=stem.name, capacity_model="" if untrained else stem.name, pipelines=None)
    if is_record(dataset):
        measured = measured.with_probed(passed_probes(results(probes_in_record(dataset))))
    return write_descriptor(dataset.parent, measured, str(about["source"]), descriptor.kind)


def _enough(rows: Sequence[Row]) -> bool:
    """Whether `rows` suffice to train: see `train`."""
    return sum(row.mode == "none" for row in rows) >= LEAST_LAUNCHES and any(row.mode != "none" for row in rows)


def basis_of(about: dict[str, Any]) -> Basis:
    """The basis in a dataset's first line.

    Raises:
        UserError: it contains none of this version.
    """
    try:
        return Basis(**about["basis"])
    except (KeyError, TypeError) as error:
        raise UserError(f"the dataset is not of this version ({error!r}); profile the device again") from error
