"""Typer commands for one model or several bundles: compile, run, plan, queue and others.

A function's parameters are the options of its command, and its docstring is the help text. The work is done in
`flashmem.cli.commands`, which is imported when the command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashmem.base.errors import UserError
from flashmem.cli.commands.options import (
    Build,
    Device,
    Disk,
    HostBudget,
    Json,
    ModelArgument,
    PlannedModel,
    ProcessMemory,
    RunStrategyOption,
    with_bundle_options,
)
from flashmem.request.request import Request


@with_bundle_options
def compile_(
    options: Request,
    model: Annotated[
        Path, typer.Argument(help="An .onnx model, or a language model: a .gguf file or a folder.", show_default=False)
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="model.flashmem", help="The bundle; default: in the user's cache.")
    ] = None,
    build: Build = True,
    with_binaries: Annotated[
        bool, typer.Option("--with-binaries", help="Store the compiled kernels in the bundle, for equal devices only.")
    ] = False,
    dump_passes: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the graph as text, as imported and after each pass, to this folder."),
    ] = None,
    within: Annotated[str | None, typer.Option(hidden=True)] = None,
    inspect: Annotated[
        bool,
        typer.Option("--inspect", help="Show what the open compiler of --device, an Adreno or Mali, makes of the kernels."),
    ] = False,
) -> None:
    """Compile a model into a bundle, compile its kernels if the device is local, and print the bundle's path."""
    from flashmem.cli.commands.compiling import ProcessLimit, compile_here

    gpu = None
    if inspect:
        from flashmem.cli.commands.inspect_kernels import inspect_kernels, inspected_gpu

        gpu = inspected_gpu(options)
    process = ProcessLimit.of(within)
    made = compile_here(
        model, output, options, build=build, with_binaries=with_binaries, dump_passes=dump_passes, process=process
    )
    print(made.path)
    if gpu is not None:
        inspect_kernels(made, gpu)


@with_bundle_options
def run(
    options: Request,
    model: ModelArgument,
    input: Annotated[Path | None, typer.Option(metavar="x.npz", help="Inputs by name; the rest is drawn from --seed.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="y.npz", help="Where to write the outputs.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs in one session; the first one is reported.")] = 1,
    verify: Annotated[bool, typer.Option("--verify", help="Compare with ONNX Runtime; exit with 1 if they differ.")] = False,
    reference: Annotated[
        Path | None, typer.Option("--model", metavar="model.onnx", help="The ONNX model of a bundle, for --verify.")
    ] = None,
    json: Json = False,
    strategy: RunStrategyOption = None,
    learn: Annotated[
        bool, typer.Option("--learn", help="Plan again with the times of these runs, and keep the plan in the bundle.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the inputs not given.")] = 0,
    trace: Annotated[Path | None, typer.Option(metavar="trace.json", help="Where to write layers and loads over time.")] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="out.html", help="A page with the runs over time, measured and predicted (needs the plots extra)."
        ),
    ] = None,
    check_weights: Annotated[
        bool,
        typer.Option("--check-weights/--no-check-weights", help="Compare weights with their checksums when read."),
    ] = False,
    check_kernels: Annotated[
        bool, typer.Option("--check-kernels", help="First check kernels that no check on this device has found right.")
    ] = False,
    host_budget: HostBudget = None,
    process_memory: ProcessMemory = None,
    build: Build = True,
    image: Annotated[Path | None, typer.Option(metavar="photo.jpg", help="A photo as input (needs the inputs extra).")] = None,
    audio: Annotated[Path | None, typer.Option(metavar="sound.wav", help="A WAV file as input, as a waveform.")] = None,
    text: Annotated[str | None, typer.Option(metavar="TEXT", help="A text as input, by the tokenizer.json beside.")] = None,
    labels: Annotated[
        Path | None, typer.Option(metavar="labels.txt", help="Names of classes, one a line.", show_default="the model's")
    ] = None,
    size: Annotated[str | None, typer.Option(metavar="WxH", help="The image's size.", show_default="the model's")] = None,
    layout: Annotated[str | None, typer.Option(metavar="NCHW|NHWC", help="Where an image's channels are.")] = None,
    color: Annotated[str | None, typer.Option(metavar="RGB|BGR|grey", help="The order of an image's channels.")] = None,
    fit: Annotated[
        str | None, typer.Option(metavar="crop|stretch|pad", help="How a photo of other proportions gets the image's size.")
    ] = None,
    rescale: Annotated[str | None, typer.Option(metavar="1/255", help="Factor for an image's values of 0 to 255.")] = None,
    mean: Annotated[str | None, typer.Option(metavar="M,M,M", help="What is subtracted from values, by channel.")] = None,
    std: Annotated[str | None, typer.Option(metavar="S,S,S", help="What values are then divided by, by channel.")] = None,
    rate: Annotated[int | None, typer.Option(min=1, max=1_000_000, metavar="HZ", help="Samples per second of --audio.")] = None,
) -> None:
    """Run a model once (or --repeat times) and report latency and memory."""
    from flashmem.cli.commands.file_inputs import FileInputs
    from flashmem.cli.commands.run import RunOptions, run_model

    flags = {"size": size, "layout": layout, "color": color, "fit": fit, "rescale": rescale, "mean": mean, "std": std}
    given = tuple((name, value) for name, value in flags.items() if value is not None)
    files = FileInputs(image, audio, text, labels, rate, given)
    chosen = strategy and strategy.value
    run_model(
        model,
        options,
        RunOptions(
            input, output, repeat, verify, reference, json, chosen, seed, trace, learn, check_weights, check_kernels,
            build, timeline, host_budget, process_memory, files,
        ),
    )  # fmt: skip


@with_bundle_options
def generate(
    options: Request,
    model: Annotated[Path, typer.Argument(help="A language model: a .gguf file, a folder, or a bundle.", show_default=False)],
    prompt: Annotated[
        str | None,
        typer.Argument(help="What to answer; none: each line of stdin, in one conversation.", show_default=False),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Continue the prompt as a text, without a chat template.")] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system's message before a conversation.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among so many likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(max=1.0, help="Sample among the likeliest tokens of this probability.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: avoid tokens that occurred.")] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Equal seeds sample equally.")] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; repeatable.")] = None,
    conversation: Annotated[
        Path | None, typer.Option(metavar="chat.npz", help="Go on with this conversation if it exists, and save it.")
    ] = None,
    speculate: Annotated[
        bool, typer.Option("--speculate/--no-speculate", help="Check drafts from the text so far, where that is faster.")
    ] = True,
    host_budget: HostBudget = None,
    process_memory: ProcessMemory = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="After the prompt, answer each line of stdin in the same conversation.")
    ] = False,
    draft: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="A small model with the same tokens, whose drafts are checked."),
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Say memory, speed and smallest budget, before any weight is read.")
    ] = False,
    json: Json = False,
) -> None:
    """Answer a prompt with a language model, and print the text as it is generated."""
    if estimate:
        from flashmem.cli.commands.estimate import show_estimate

        show_estimate(model, options, as_json=json)
        return
    from flashmem.cli.commands.generate import GenerateOptions, generate_text

    chosen = GenerateOptions(
        plain, system, max_new_tokens, temperature, top_k, top_p, repetition_penalty, seed, tuple(stop or ()), json,
        conversation, speculate, host_budget, draft, process_memory, chat,
    )  # fmt: skip
    generate_text(model, prompt, options, chosen)


@with_bundle_options
def serve(
    options: Request,
    model: Annotated[Path, typer.Argument(help="A language model: a .gguf file, a folder, or a bundle.", show_default=False)],
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 for other machines too.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for any free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="The model's name for clients.", show_default="that of the file")] = None,
    host_budget: HostBudget = None,
    process_memory: ProcessMemory = None,
) -> None:
    """Serve a language model by HTTP, with the interface of OpenAI's API."""
    from flashmem.cli.commands.serve import serve_model

    serve_model(model, options, host, port, name, host_budget, process_memory)


@with_bundle_options
def plan(
    options: Request,
    model: PlannedModel,
    json: Json = False,
    show_all: Annotated[bool, typer.Option("--all", help="Every layer and slice, however many.")] = False,
) -> None:
    """Show the overlap plan of a bundle, of a model compiled with these options, or of a known architecture, and check it."""
    from flashmem.cli.commands.plan import show_plan

    show_plan(model, options, as_json=json, show_all=show_all)


def check(
    bundle: Annotated[Path, typer.Argument(metavar="model.flashmem", help="A bundle.", show_default=False)], json: Json = False
) -> None:
    """Read all of a bundle, including the weights, and check that it is undamaged."""
    from flashmem.cli.commands.bundles import check_bundle

    check_bundle(bundle, as_json=json)


def verify(
    bundle: Annotated[Path, typer.Argument(metavar="model.flashmem", help="A bundle.", show_default=False)],
    device: Annotated[str | None, typer.Option(metavar="NAME", help="A device, or 'auto'.", show_default=False)] = None,
    again: Annotated[bool, typer.Option("--again", help="Check what an earlier check found right, too.")] = False,
    seconds: Annotated[
        float | None, typer.Option(metavar="S", help="Begin no check after S seconds.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Check what the driver makes of each kernel of a bundle: every launch, compared with the kernel's text."""
    from flashmem.cli.commands.verify import verify_bundle

    if not verify_bundle(bundle, device, again=again, seconds=seconds, as_json=json):
        raise typer.Exit(1)


def replan(
    bundle: Annotated[Path, typer.Argument(metavar="model.flashmem", help="A bundle.", show_default=False)],
    budget: Annotated[str, typer.Option(metavar="SIZE", help="The new limit on all memory.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="other.flashmem", help="A new bundle that shares its weights.")
    ] = None,
) -> None:
    """Plan a bundle again for another budget, without its model and without a solver, and print the bundle's path."""
    from flashmem.cli.commands.bundles import replan_bundle

    print(replan_bundle(bundle, budget, output))


def cache_list(context: typer.Context, json: Json = False) -> None:
    """List the bundles in the user's cache (model, size, time of last use), and the size of the compiled kernels."""
    from flashmem.cli.commands.bundles import list_cache

    if context.invoked_subcommand is None:
        list_cache(as_json=json)


def cache_clear() -> None:
    """Remove compiled kernels, and all bundles except those that a session has open."""
    from flashmem.cli.commands.bundles import clear_cache

    clear_cache()


def queue(
    bundles: Annotated[list[Path], typer.Argument(metavar="BUNDLE...", help="Compiled models.", show_default=False)],
    budget: Annotated[str | None, typer.Option(metavar="SIZE", help="Limit on the memory of all of them together.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="requests.json", help='Requests: [{"model": "a", "at": 0.5, "seed": 1}, ...].'),
    ] = None,
    iterations: Annotated[int, typer.Option(min=1, help="Without --trace: runs of each, in random order.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of that order, and of inputs.")] = 0,
    device: Device = None,
    host_budget: HostBudget = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="memory.png", help="Plot of memory over time, with preloading sessions (plots extra)."),
    ] = None,
    json: Json = False,
) -> None:
    """Run requests to several models under one budget, in their order in time, and print how long each waited."""
    from flashmem.cli.commands.queue import QueueOptions, play_queue

    play_queue(QueueOptions(tuple(bundles), budget, trace, iterations, seed, device or "auto", host_budget, plot, json))


@with_bundle_options
def simulate(
    options: Request,
    model: PlannedModel,
    disk: Annotated[Disk, typer.Option(help="Whether the weight file is in the page cache.")] = Disk.CACHED,
    strategy: RunStrategyOption = None,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="out.html", help="Work and memory over time: a page, or a .png figure (needs the plots extra)."),
    ] = None,
    host_budget: HostBudget = None,
    json: Json = False,
) -> None:
    """Predict latency and memory of a plan on a device from its descriptor; the device need not be present."""
    from flashmem.cli.commands.simulate import options_of, simulate_model

    simulate_model(model, options, options_of(disk.value, strategy and strategy.value, json, timeline, host_budget))


def demo(
    image: Annotated[
        Path | None, typer.Argument(metavar="[IMAGE|generate]", help="An image to read; default: a generated page.")
    ] = None,
    prompt: Annotated[str | None, typer.Argument(help="What the language model of `demo generate` answers.")] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory limit of a network.", show_default="50MB; generate: 60MB")
    ] = None,
    device: Device = None,
) -> None:
    """Read the text in an image with two trained networks, or answer a prompt with a language model, in a memory budget."""
    from flashmem.cli.demo import chat, run

    if image == Path("generate"):
        chat.run_demo(prompt, budget=budget, device=device)
    elif prompt is not None:
        raise UserError(f"{prompt!r} follows an image; only `flashmem demo generate` takes a prompt")
    else:
        run.run_demo(image, budget=budget or "50MB", device=device or "auto")
