"""Typer commands that examine devices or explore many models: doctor, profile, tune, design, sweep, zoo.

See `flashmem.cli.model_commands`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashmem.cli.commands.options import (
    AUTO_MODE,
    AUTO_OBJECTIVE,
    Device,
    Disk,
    Json,
    Mode,
    ObjectiveName,
    Shape,
)


def devices(
    measure: Annotated[
        bool,
        typer.Option("--measure/--no-measure", help="First measure devices whose rates are another processor's, in seconds."),
    ] = True,
    json: Json = False,
) -> None:
    """Show the devices of this machine, the memory path and transfer mode of each, and why other modes do not work."""
    from flashmem.cli.commands.devices import measure_devices, show_devices

    if measure:
        measure_devices()
    show_devices(as_json=json)


def doctor(json: Json = False) -> None:
    """Check OpenCL from the linker up, name the command that repairs a failure, and test each device for two seconds.

    Exits with 1 unless one device passes every test.
    """
    from flashmem.cli.commands.doctor import examine

    if not examine(as_json=json):
        raise typer.Exit(1)


def profile(
    device: Device = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes to measure, over all resumed calls.")] = 15.0,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Folder for the descriptor, the model and the dataset.")
    ] = Path(),
    name: Annotated[str, typer.Option(help="Name of the files.", show_default="the descriptor's")] = "",
    model: Annotated[
        list[Path] | None, typer.Option(metavar="model.onnx", help="Measure this model's launches too; repeatable.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume/--fresh", help="Continue an interrupted profile, or start again.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed for drawing kernels.")] = 0,
    kit: Annotated[
        Path | None,
        typer.Option(metavar="x.kit", help="Measure nothing: write a kit for measuring --device on another machine."),
    ] = None,
    measure: Annotated[
        Path | None, typer.Option(metavar="x.kit", help="Measure with a kit, without the compiler, and write the dataset only.")
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(metavar="x.profile.csv.gz", help="Measure nothing: train on this dataset, or on a phone kit's JSON."),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="With --dataset: keep this model's launches out of training; repeatable."),
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="With --dataset: evaluate predictions, train nothing.")] = False,
    figures: Annotated[Path | None, typer.Option(metavar="DIR", help="With --report: draw figures into this folder.")] = None,
    again: Annotated[
        Path | None,
        typer.Option(metavar="x.profile.csv.gz", help="With --report: another profile of the device, to compare with."),
    ] = None,
) -> None:
    """Measure a device, train its capacity model, and print the path of the descriptor written."""
    from flashmem.base.errors import UserError
    from flashmem.cli.commands.profile import measure_device, profile_device, report_on, retrain_model, write_kit

    if (report and dataset is None) or (not report and (figures or again)):
        raise UserError("--report needs --dataset; --figures and --again need --report; name the dataset that a profile wrote")
    if sum(each is not None for each in (kit, measure, dataset)) > 1:
        raise UserError("--kit, --measure and --dataset are three steps; name one of them")
    if without and (report or dataset is None):
        raise UserError("--without needs --dataset, and does not go with --report: it says what training leaves out")
    if kit is not None:
        print(write_kit(kit, device or "auto", tuple(model or ()), seed))
    elif measure is not None:
        print(measure_device(measure, device or "auto", output, minutes=minutes, name=name, resume=resume))
    elif report and dataset is not None:
        report_on(dataset, figures, again)
    elif dataset is not None:
        print(retrain_model(dataset, tuple(without or ())))
    else:
        models = tuple(model or ())
        print(profile_device(device or "auto", output, minutes=minutes, name=name, models=models, resume=resume, seed=seed))


def tune(
    device: Device = None,
    minutes: Annotated[float, typer.Option(min=0.05, help="Minutes to measure, in this call.")] = 4.0,
    family: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only kernels of this family: matmul, conv, matmul_dynamic, attention; repeatable."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="Folder for the tuning database and its descriptor.",
            show_default="next to a descriptor in a file, else here",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume/--fresh", help="Measure missing configs, or start again.")] = True,
) -> None:
    """Measure a device's kernel configs, most useful workloads first, and print the path of the descriptor to compile with."""
    from flashmem.cli.commands.tune import tune_device

    print(tune_device(device or "auto", output, minutes=minutes, families=tuple(family or ()), resume=resume))


def design(
    application: Annotated[Path, typer.Argument(metavar="app.toml", help="Tasks, models, objectives.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Folder for the designs' bundles and design.json.")
    ] = None,
    runs: Annotated[int, typer.Option(min=2, help="Measured answers of each candidate, after the first.")] = 20,
    simulate: Annotated[bool, typer.Option("--simulate", help="Predict candidates from descriptors; measure nothing.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the inputs.")] = 0,
    json: Json = False,
) -> None:
    """Choose models, devices and budgets for an application's objectives, and the alternatives when a processor or memory is
    occupied.
    """
    from flashmem.cli.commands.design import DesignOptions, design_application

    design_application(DesignOptions(application, output, runs, simulate, seed, json))


def sweep(
    models: Annotated[
        list[Path], typer.Argument(metavar="MODEL...", help=".onnx models, bundles, or zoo:NAME.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="sweep.csv", help="Results file; rows are added as they finish.")
    ] = Path("sweep.csv"),
    plot: Annotated[
        Path | None,
        typer.Option(metavar="sweep.png", help="Plot of latency against memory; a second one shows preloading."),
    ] = None,
    m_peak: Annotated[str | None, typer.Option(metavar="SIZE,...", help="Limits on weights in flight.")] = None,
    budget: Annotated[str | None, typer.Option(metavar="SIZE,...", help="Limits on all memory.")] = None,
    lambda_: Annotated[
        str | None,
        typer.Option("--lambda", metavar="NUMBER,...", help="Latency (0) against memory (1).", show_default="0; paper: 0.9"),
    ] = None,
    mu: Annotated[str, typer.Option(metavar="NUMBER,...", help="Weights of loading distance in adaptive unfusion.")] = "0.1",
    precision: Annotated[str, typer.Option(metavar="NAME,...", help="As of flashmem compile: fp32, fp16, tf32.")] = "fp32",
    device: Annotated[str, typer.Option(metavar="NAME,...", help="Local devices, descriptors, or 'auto'.")] = "auto",
    chunk: Annotated[str, typer.Option(metavar="SIZE", help="Unit of transfer (S).")] = "auto",
    shape: Shape = None,
    objective: Annotated[
        ObjectiveName, typer.Option(help="The first answer (auto), later runs, or the paper's sum.")
    ] = AUTO_OBJECTIVE,
    mode: Annotated[Mode, typer.Option(help="How weights are transferred.")] = AUTO_MODE,
    disk: Annotated[Disk, typer.Option(help="Whether the weight file is in the page cache.")] = Disk.CACHED,
    measured: Annotated[bool, typer.Option("--measured/--simulated", help="Run every point, or predict it.")] = False,
    runs: Annotated[int, typer.Option(min=1, help="Fresh processes for each measured point; the result is their median.")] = 3,
    executor: Annotated[str, typer.Option(metavar="local|dask|ray", help="Where points are simulated.")] = "local",
    address: Annotated[str | None, typer.Option(help="Address of the cluster.", show_default="as configured")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Local processes.", show_default="half the cores")] = None,
) -> None:
    """Plan, and simulate or measure, a grid of limits and parameters over models and devices; resumable."""
    from flashmem.cli.commands.sweep import SweepOptions
    from flashmem.cli.commands.sweep import sweep as run_sweep

    run_sweep(
        SweepOptions(
            models=tuple(models),
            output=output,
            plot=plot,
            m_peak=m_peak,
            budget=budget,
            lambda_=lambda_,
            mu=mu,
            precision=precision,
            device=device,
            chunk=chunk,
            shape=tuple(shape or ()),
            objective=objective.value,
            mode=mode.value,
            disk=disk.value,
            measured=measured,
            runs=runs,
            executor=executor,
            address=address,
            jobs=jobs,
        )
    )


def zoo_list() -> None:
    """List the models and the default input size of each."""
    from flashmem.cli.commands.zoo import list_models

    list_models()


def zoo_export(
    name: Annotated[str, typer.Argument(show_default=False)],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Where model.onnx is written.", show_default=False)
    ],
    size: Annotated[int | None, typer.Option(min=1, help="In the unit of `zoo list`.", show_default="the model's own")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights.")] = 0,
    exporter: Annotated[str, typer.Option(help="dynamo or legacy.")] = "dynamo",
) -> None:
    """Export one of the models with PyTorch (needs the zoo extra), and print the file's path.

    Writes inputs.npz, an example of every input for `flashmem run --input`, and export.json, a record of the export.
    """
    from flashmem.cli.commands.zoo import export_model

    print(export_model(name, output, size=size, seed=seed, exporter=exporter))
