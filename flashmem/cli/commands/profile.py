"""`flashmem profile`: measure a device, train its capacity model, and write its descriptor."""

from __future__ import annotations

from pathlib import Path

from flashmem.base.errors import MissingFileError, UserError
from flashmem.base.extras import need
from flashmem.base.streams import say
from flashmem.cli.calls.devices import ProfileCommand
from flashmem.cli.output.console import progress


def profile_device(call: ProfileCommand) -> Path:
    """Profile a device with a progress bar; returns the descriptor's path.

    Raises:
        UserError: see `profiler.run.profile`.
    """
    _need_extra()
    from flashmem.profiler.run import ProfileRequest, profile

    _check_output(call)
    for model in call.model:
        if not model.is_file():
            raise MissingFileError(f"model {model} does not exist; name an ONNX file")
    request = ProfileRequest(call.device, call.output, call.minutes, call.name, call.model, call.resume, call.seed)
    with progress("profiling") as report:
        path: Path = profile(request, report)
    say(f"use it as --device {path}")
    return path


def _check_output(call: ProfileCommand) -> None:
    name = call.name
    output = call.output
    if name and not name.replace("-", "").replace("_", "").isalnum():
        raise UserError(f"--name {name!r} cannot be a file's name; use letters, digits, '-' and '_'")
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is not a folder; name one")


def measure_device(call: ProfileCommand, kit: Path) -> Path:
    """Measure a device with the launches of a kit, without a compiler; returns the dataset's path.

    Raises:
        UserError: not a kit for this device, too little time, or an interrupted profile of another device or kit exists.
        RunError: the device fails.
    """
    from flashmem.profiler.kit import Kit
    from flashmem.profiler.measure import LEAST_LAUNCHES, ProfileRequest, measure
    from flashmem.runtime.opencl.devices import descriptor_for
    from flashmem.runtime.opencl.discovery import find_device

    _check_output(call)
    held = Kit(kit)
    here = find_device(call.device)
    descriptor = descriptor_for(here)
    if descriptor.name != held.descriptor.name:
        what = f"{kit} is for {held.descriptor.name}, and {here.name} is {descriptor.name}"
        raise UserError(f"{what}; make one with: flashmem profile --kit {descriptor.name}.kit --device {descriptor.name}")
    request = ProfileRequest(call.device, call.output, call.minutes, call.name, (), call.resume, held.seed)
    with progress("measuring") as report:
        found = measure(request, here, descriptor, held.models(), report, held.supply)
    count = sum(row.mode == "none" for row in found.growing.rows)
    if count < LEAST_LAUNCHES:
        raise UserError(f"{count} launches are too few to learn from, {LEAST_LAUNCHES} are the least; measure for more minutes")
    path = found.write(call.output, call.name or descriptor.name)
    found.done()
    say(f"train on it where the compiler is: flashmem profile --dataset {path.name}")
    return path


def write_kit(call: ProfileCommand, path: Path) -> Path:
    """Write a kit for measuring a device on another machine; returns the kit's path.

    Raises:
        UserError: no such device or descriptor, or a model cannot be run.
    """
    _need_extra()
    from flashmem.base.files import check_target
    from flashmem.profiler.packing import write_kit as write
    from flashmem.runtime.request.options import find_descriptor

    check_target(path, "--kit")
    descriptor = find_descriptor(call.device)
    with progress("packing") as report:
        made: Path = write(path, descriptor, call.model, call.seed, report)
    return made


def retrain_model(dataset: Path, without: tuple[str, ...]) -> Path:
    """Train on a dataset again, `without` the launches of some models. Returns the path of the model, without its suffixes."""
    _need_extra()
    from flashmem.profiler.run import retrain

    path: Path = retrain(dataset, without)
    return path


def report_on(dataset: Path, figures: Path | None, again: Path | None) -> None:
    """Print the prediction errors on held-out launches; with `figures`, draw them into that folder.

    `again` is another profile of the same device; the difference between the two is printed first.

    Raises:
        UserError: not datasets of this version, too few launches, or matplotlib is not installed for `figures`.
    """
    _need_extra()
    if figures is not None:
        from flashmem.tools.plots.figure import require_matplotlib

        if figures.exists() and not figures.is_dir():
            raise UserError(f"--figures {figures} is not a folder; name one")
        require_matplotlib()
    from flashmem.cli.output.profile_report import print_repeats, print_report
    from flashmem.profiler.report import held_out

    if again is not None:
        print_repeats(dataset, again)
    parts = held_out(dataset)
    print_report(dataset, parts)
    if figures is not None:
        from flashmem.profiler.figures import draw_figures

        for path in draw_figures(dataset, parts, figures):
            say(f"drew {path}")


def _need_extra() -> None:
    need("profiling", "xgboost", "jinja2", "onnx", "ortools")
