"""`flashmem profile`: measures a device, trains its capacity model, and writes its descriptor."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from flashmem.commands.extras import offline_half
from flashmem.console import progress, say
from flashmem.errors import MissingFileError, UserError
from flashmem.plots.figure import require_matplotlib


def profile_device(
    device: str, output: Path, *, minutes: float, name: str, models: tuple[Path, ...], resume: bool, seed: int
) -> Path:
    """Profiles a device with a progress bar; returns the descriptor's path.

    Raises:
        UserError: see `profiler.run.profile`.
    """
    _need_extra()
    from flashmem.profiler.run import Request, profile

    if name and not name.replace("-", "").replace("_", "").isalnum():
        raise UserError(f"--name {name!r} cannot be a file's name; use letters, digits, '-' and '_'")
    for model in models:
        if not model.is_file():
            raise MissingFileError(f"model {model} does not exist; name an ONNX file")
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is not a folder; name one")
    request = Request(device, output, minutes, name, models, resume, seed)
    with progress("profiling") as report:
        path: Path = profile(request, report)
    say(f"use it as --device {path}")
    return path


def retrain_model(dataset: Path, without: tuple[str, ...]) -> Path:
    """Trains anew on a dataset, without a device and `without` the launches of some models; returns the path of what was
    trained, without its suffixes.
    """
    _need_extra()
    from flashmem.profiler.run import retrain

    path: Path = retrain(dataset, without)
    return path


def report_on(dataset: Path, figures: Path | None, again: Path | None) -> None:
    """Prints how good predictions are on what was held out; with `figures`, draws them into that folder.

    `again` is another profile of the same device: how far the two lie apart is printed first.

    Raises:
        UserError: not datasets of this version, too few launches, or matplotlib is missing for `figures`.
    """
    _need_extra()
    if figures is not None:
        if figures.exists() and not figures.is_dir():
            raise UserError(f"--figures {figures} is not a folder; name one")
        require_matplotlib()
    from flashmem.profiler.report import held_out, print_repeats, print_report

    if again is not None:
        print_repeats(dataset, again)
    parts = held_out(dataset)
    print_report(dataset, parts)
    if figures is not None:
        from flashmem.profiler.figures import draw_figures

        for path in draw_figures(dataset, parts, figures):
            say(f"drew {path}")


def _need_extra() -> None:
    with offline_half("profiling"):
        for module in ("xgboost", "jinja2", "onnx", "ortools"):
            import_module(module)
