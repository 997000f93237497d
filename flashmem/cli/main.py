"""The command line: `flashmem doctor | compile | run | queue | plan | check | replan | cache | profile | tune | simulate ...`.

Each command parses its options (those that several share are declared in `flashmem.cli.commands.options`) and hands over to
`flashmem.commands`; nothing heavier than typer is imported before a command is chosen, and `run` of a bundle imports the online
half only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flashmem import __version__
from flashmem.base.interrupts import unwinding
from flashmem.base.streams import exit_codes, prepare_streams
from flashmem.cli.commands.compiling import CompileOptions
from flashmem.cli.commands.options import (
    Build,
    Device,
    Disk,
    Json,
    Mode,
    ModelArgument,
    Objective,
    PlannedModel,
    RunStrategyOption,
    Shape,
    with_bundle_options,
)


class _Commands(TyperGroup):
    """Errors of a command are reported here, because typer has words of its own for some of them."""

    def invoke(self, ctx: Any) -> Any:
        with exit_codes(), unwinding():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
zoo = typer.Typer(help="Known models with random weights, exported to ONNX.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(zoo, name="zoo")
cache = typer.Typer(help="List what is in the user's cache, or clear it.", rich_markup_mode=None)
app.add_typer(cache, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"flashmem {__version__}")
        raise typer.Exit


@app.callback()
def options_before_the_command(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Run neural networks larger than memory on OpenCL devices."""


@app.command()
def devices(json: Json = False) -> None:
    """Show which devices are here, the memory path and transfer mode each would use, and why not others."""
    from flashmem.cli.commands.devices import show_devices

    show_devices(as_json=json)


@app.command()
def doctor(json: Json = False) -> None:
    """Look for OpenCL from the linker up, say what to type where something is missing, and test each device for two seconds.

    Exits with 1 unless there is a device on which every test went well.
    """
    from flashmem.cli.commands.doctor import examine

    if not examine(as_json=json):
        raise typer.Exit(1)


@app.command("compile")
@with_bundle_options
def compile_(
    options: CompileOptions,
    model: Annotated[Path, typer.Argument(help="An .onnx model.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="model.flashmem", help="The bundle; the user's cache without it.")
    ] = None,
    build: Build = True,
    with_binaries: Annotated[
        bool, typer.Option("--with-binaries", help="Keep the compiled kernels in the bundle, for devices exactly like this.")
    ] = False,
) -> None:
    """Compile a model into a bundle, and its kernels if the device is here, and print the bundle's path."""
    from flashmem.cli.commands.compiling import compile_here

    print(compile_here(model, output, options, build=build, with_binaries=with_binaries).path)


@app.command()
@with_bundle_options
def run(
    options: CompileOptions,
    model: ModelArgument,
    input: Annotated[Path | None, typer.Option(metavar="x.npz", help="Inputs by name; the rest is drawn from --seed.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="y.npz", help="Where to write the outputs.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs in one session; the first one is reported.")] = 1,
    verify: Annotated[bool, typer.Option("--verify", help="Compare with ONNX Runtime; exit with 1 if they differ.")] = False,
    reference: Annotated[
        Path | None, typer.Option("--model", metavar="model.onnx", help="The original of a bundle, for --verify.")
    ] = None,
    json: Json = False,
    strategy: RunStrategyOption = None,
    learn: Annotated[
        bool, typer.Option("--learn", help="Plan again with the times of these runs, and keep the plan in the bundle.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the inputs not given.")] = 0,
    trace: Annotated[Path | None, typer.Option(metavar="trace.json", help="Where to write layers and loads over time.")] = None,
    check_weights: Annotated[
        bool, typer.Option("--check-weights/--no-check-weights", help="Compare weights with their digests as they come in.")
    ] = False,
    build: Build = True,
) -> None:
    """Run a model once (or --repeat times) and report latency and memory."""
    from flashmem.cli.commands.run import RunOptions, run_model

    chosen = strategy and strategy.value
    run_model(
        model,
        options,
        RunOptions(input, output, repeat, verify, reference, json, chosen, seed, trace, learn, check_weights, build),
    )


@app.command()
@with_bundle_options
def plan(
    options: CompileOptions,
    model: PlannedModel,
    json: Json = False,
    show_all: Annotated[bool, typer.Option("--all", help="Every layer and slice, however many.")] = False,
) -> None:
    """Show the overlap plan of a bundle, of a model compiled with these options, or of a known architecture, and check it."""
    from flashmem.cli.commands.plan import show_plan

    show_plan(model, options, as_json=json, show_all=show_all)


@app.command()
def check(
    bundle: Annotated[Path, typer.Argument(metavar="model.flashmem", help="A bundle.", show_default=False)], json: Json = False
) -> None:
    """Read all of a bundle, weights too, and say whether it is what was written."""
    from flashmem.cli.commands.bundles import check_bundle

    check_bundle(bundle, as_json=json)


@app.command()
def replan(
    bundle: Annotated[Path, typer.Argument(metavar="model.flashmem", help="A bundle.", show_default=False)],
    budget: Annotated[str, typer.Option(metavar="SIZE", help="The new limit on all memory.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="other.flashmem", help="Another bundle, that shares its weights.")
    ] = None,
) -> None:
    """Plan a bundle again for another budget, without its model and without a solver, and print the bundle's path."""
    from flashmem.cli.commands.bundles import replan_bundle

    print(replan_bundle(bundle, budget, output))


@cache.callback(invoke_without_command=True)
def cache_list(context: typer.Context, json: Json = False) -> None:
    """List the bundles in the user's cache (model, size, when they were last used), and what compiled kernels take."""
    from flashmem.cli.commands.bundles import list_cache

    if context.invoked_subcommand is None:
        list_cache(as_json=json)


@cache.command("clear")
def cache_clear() -> None:
    """Remove compiled kernels, and all bundles but those that a session has open."""
    from flashmem.cli.commands.bundles import clear_cache

    clear_cache()


@app.command()
def profile(
    device: Device = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time to measure, over all calls that resume.")] = 15.0,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Where the descriptor, the model and the dataset go.")
    ] = Path(),
    name: Annotated[str, typer.Option(help="Name of the files.", show_default="the descriptor's")] = "",
    model: Annotated[
        list[Path] | None, typer.Option(metavar="model.onnx", help="Measure this model's launches too; repeatable.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume/--fresh", help="Go on with an interrupted profile, or begin anew.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the kernels that are drawn.")] = 0,
    kit: Annotated[
        Path | None,
        typer.Option(metavar="x.kit", help="Measure nothing: write what --device, which need not be here, measures."),
    ] = None,
    measure: Annotated[
        Path | None, typer.Option(metavar="x.kit", help="Measure with a kit, without the compiler, and write the dataset only.")
    ] = None,
    dataset: Annotated[
        Path | None, typer.Option(metavar="x.profile.csv.gz", help="Measure nothing: train anew on this dataset.")
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="With --dataset: keep this model's launches out of training; repeatable."),
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="With --dataset: judge predictions, and train nothing.")] = False,
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


@app.command()
def tune(
    device: Device = None,
    minutes: Annotated[float, typer.Option(min=0.05, help="Time to measure, of this call.")] = 4.0,
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
            help="Where the table and the descriptor that names it go.",
            show_default="beside a descriptor in a file, else here",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume/--fresh", help="Measure what the table lacks, or begin anew.")] = True,
) -> None:
    """Measure a device's kernel configs, most useful shapes first, and print the path of the descriptor to compile with."""
    from flashmem.cli.commands.tune import tune_device

    print(tune_device(device or "auto", output, minutes=minutes, families=tuple(family or ()), resume=resume))


@app.command()
def queue(
    bundles: Annotated[list[Path], typer.Argument(metavar="BUNDLE...", help="Compiled models.", show_default=False)],
    budget: Annotated[str | None, typer.Option(metavar="SIZE", help="Limit on the memory of all of them together.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="requests.json", help='Who asks when: [{"model": "a", "at": 0.5, "seed": 1}, ...].'),
    ] = None,
    iterations: Annotated[int, typer.Option(min=1, help="Without --trace: runs of each, in random order.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of that order, and of inputs.")] = 0,
    device: Device = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="memory.png", help="Memory over time, beside sessions that preload each model (plots extra)."),
    ] = None,
    json: Json = False,
) -> None:
    """Play requests to several models under one budget, in the order in which they come, and say how long each waited."""
    from flashmem.cli.commands.queue import QueueOptions, play_queue

    play_queue(QueueOptions(tuple(bundles), budget, trace, iterations, seed, device or "auto", plot, json))


@app.command()
def design(
    application: Annotated[Path, typer.Argument(metavar="app.toml", help="Tasks, models, objectives.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Where the designs' bundles and design.json go.")
    ] = None,
    runs: Annotated[int, typer.Option(min=2, help="Answers measured of each candidate, after the first.")] = 20,
    simulate: Annotated[bool, typer.Option("--simulate", help="Predict candidates from descriptors; measure nothing.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the inputs.")] = 0,
    json: Json = False,
) -> None:
    """Choose models, devices and budgets for an application's objectives, and what it switches to when a processor or memory is
    taken.
    """
    from flashmem.cli.commands.design import DesignOptions, design_application

    design_application(DesignOptions(application, output, runs, simulate, seed, json))


@app.command()
@with_bundle_options
def simulate(
    options: CompileOptions,
    model: PlannedModel,
    disk: Annotated[Disk, typer.Option(help="Whether the weight file is in the page cache.")] = Disk.CACHED,
    strategy: RunStrategyOption = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="out.png", help="Where to draw work and memory over time (needs the plots extra).")
    ] = None,
    json: Json = False,
) -> None:
    """Predict latency and memory of a plan on a described device, which need not be here."""
    from flashmem.cli.commands.simulate import options_of, simulate_model

    simulate_model(model, options, options_of(disk.value, strategy and strategy.value, json, timeline))


@app.command()
def sweep(
    models: Annotated[
        list[Path], typer.Argument(metavar="MODEL...", help=".onnx models, bundles, or zoo:NAME.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="sweep.csv", help="Rows are added here as they finish.")
    ] = Path("sweep.csv"),
    plot: Annotated[
        Path | None,
        typer.Option(metavar="sweep.png", help="Draws latency against memory here and, beside it, against preloading."),
    ] = None,
    m_peak: Annotated[str | None, typer.Option(metavar="SIZE,...", help="Limits on weights in flight.")] = None,
    budget: Annotated[str | None, typer.Option(metavar="SIZE,...", help="Limits on all memory.")] = None,
    lambda_: Annotated[
        str | None,
        typer.Option("--lambda", metavar="NUMBER,...", help="Latency (0) against memory (1).", show_default="0; paper: 0.9"),
    ] = None,
    mu: Annotated[str, typer.Option(metavar="NUMBER,...", help="Weights of loading distance in adaptive unfusion.")] = "0.1",
    precision: Annotated[
        str, typer.Option(metavar="NAME,...", help="What weights and activations are stored in: fp32, fp16.")
    ] = "fp32",
    device: Annotated[str, typer.Option(metavar="NAME,...", help="Devices here, descriptors, or 'auto'.")] = "auto",
    chunk: Annotated[str, typer.Option(metavar="SIZE", help="Unit of transfer (S).")] = "auto",
    shape: Shape = None,
    objective: Annotated[
        Objective, typer.Option(help="The first answer (auto), later runs, or the paper's sum.")
    ] = Objective.AUTO,
    mode: Annotated[Mode, typer.Option(help="How weights reach the kernels.")] = Mode.AUTO,
    disk: Annotated[Disk, typer.Option(help="Whether the weight file is in the page cache.")] = Disk.CACHED,
    measured: Annotated[bool, typer.Option("--measured/--simulated", help="Run every point, or predict it.")] = False,
    runs: Annotated[int, typer.Option(min=1, help="Fresh processes for each measured point; medians are kept.")] = 3,
    executor: Annotated[str, typer.Option(metavar="local|dask|ray", help="Where points are simulated.")] = "local",
    address: Annotated[str | None, typer.Option(help="Of the dask or ray cluster.", show_default="as configured")] = None,
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


@zoo.command("list")
def zoo_list() -> None:
    """List the models and the input size each has by default."""
    from flashmem.cli.commands.zoo import list_models

    list_models()


@zoo.command("export")
def zoo_export(
    name: Annotated[str, typer.Argument(show_default=False)],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Where model.onnx is written.", show_default=False)
    ],
    size: Annotated[int | None, typer.Option(min=1, help="In what `zoo list` names.", show_default="the model's own")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights.")] = 0,
    exporter: Annotated[str, typer.Option(help="dynamo or legacy.")] = "dynamo",
) -> None:
    """Export one of the models with PyTorch (needs the zoo extra), and print the file's path.

    inputs.npz beside it holds an example of every input, for `flashmem run --input`; export.json says what was exported.
    """
    from flashmem.cli.commands.zoo import export_model

    print(export_model(name, output, size=size, seed=seed, exporter=exporter))


@app.command()
def demo(
    image: Annotated[Path | None, typer.Argument(help="An image to read; a page drawn for it without one.")] = None,
    budget: Annotated[str, typer.Option(metavar="SIZE", help="Memory limit for each of the two networks.")] = "50MB",
    device: Device = None,
) -> None:
    """Read the text in an image with two trained networks, inside a memory budget."""
    from flashmem.cli.demo.run import run_demo

    run_demo(image, budget=budget, device=device or "auto")


def main() -> None:
    """The command line, as `sys.argv` has it; always ends with SystemExit."""
    prepare_streams()
    with exit_codes():
        app()
