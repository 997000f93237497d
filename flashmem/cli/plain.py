"""The command line without typer, for phones: `flashmem doctor | devices | run | check | replan ...`.

It parses the options of `flashmem.cli.main` with argparse; the work is done in `flashmem.cli.commands`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from flashmem.base.interrupts import unwinding
from flashmem.base.streams import exit_codes, prepare_streams
from flashmem.base.version import __version__
from flashmem.bundle.shape_variants import read_variants
from flashmem.request.request import Request

Command = Callable[[argparse.Namespace], int | None]

HOST_BUDGET = "limit on host memory for staging and weights, on a device with memory of its own"
PROCESS_MEMORY = "limit on the whole process, driver and interpreter too, in place of --budget"


def main() -> None:
    """Run the command line in `sys.argv`; always raises SystemExit."""
    prepare_streams()
    arguments = _parser().parse_args()
    with exit_codes(), unwinding():
        code = arguments.command(arguments)
        sys.exit(code or 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("flashmem", description="Run neural networks larger than memory on OpenCL devices.")
    parser.add_argument("--version", action="version", version=f"flashmem {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Command, what: str, *, json: bool = True) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=what, description=what)
        made.set_defaults(command=command)
        if json:
            made.add_argument("--json", action="store_true", help="print one JSON object on stdout instead of a report")
        return made

    def bundle(made: argparse.ArgumentParser) -> None:
        made.add_argument("bundle", type=Path, metavar="model.flashmem", help="a bundle")

    add("doctor", _doctor, "Look for OpenCL from the linker up, say what to type, and test each device.")
    add("devices", _devices, "Show which devices are here, and how each would be used.")
    run = add("run", _run, "Run a bundle and report latency and memory.")
    bundle(run)
    run.add_argument("--input", type=Path, metavar="x.npz", help="inputs by name; the rest is drawn from --seed")
    run.add_argument("--output", type=Path, metavar="y.npz", help="where to write the outputs")
    run.add_argument("--shape", action="append", metavar="NAME=1x128", help="the shape variant, if the bundle has several")
    run.add_argument("--repeat", type=int, default=1, help="runs in one session; the first one is reported")
    run.add_argument("--device", metavar="NAME", help="a device, or 'auto'")
    run.add_argument("--mode", metavar="NAME", help="how weights are transferred")
    run.add_argument("--budget", metavar="SIZE", help="limit on all memory, for instance 256MB")
    run.add_argument("--host-budget", metavar="SIZE|auto", help=HOST_BUDGET)
    run.add_argument("--process-memory", metavar="SIZE", help=PROCESS_MEMORY)
    run.add_argument("--strategy", metavar="NAME", help="when weights are loaded")
    run.add_argument("--learn", action="store_true", help="plan again with the times of these runs, and keep the plan")
    run.add_argument("--seed", type=int, default=0, help="seed of the inputs not given")
    run.add_argument("--trace", type=Path, metavar="trace.json", help="where to write layers and loads over time")
    run.add_argument("--check-weights", action="store_true", help="compare weights with their checksums when read")
    run.add_argument("--check-kernels", action="store_true", help="first check kernels that no check has found right here")
    generate = add("generate", _generate, "Answer a prompt with a language model, and print the text as it is generated.")
    bundle(generate)
    generate.add_argument("prompt", nargs="?", help="what to answer; none: each line of stdin, in one conversation")
    generate.add_argument("--plain", action="store_true", help="continue the prompt as a text, without a chat template")
    generate.add_argument("--chat", action="store_true", help="after the prompt, answer each line of stdin too")
    generate.add_argument("--system", metavar="TEXT", help="the system's message before a conversation")
    generate.add_argument("--device", metavar="NAME", help="a device, or 'auto'")
    generate.add_argument("--mode", metavar="NAME", help="how weights are transferred")
    generate.add_argument("--budget", metavar="SIZE", help="limit on all memory, for instance 256MB")
    generate.add_argument("--host-budget", metavar="SIZE|auto", help=HOST_BUDGET)
    generate.add_argument("--process-memory", metavar="SIZE", help=PROCESS_MEMORY)
    generate.add_argument("--max-new-tokens", type=int, default=256, help="the most tokens of an answer")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    generate.add_argument("--top-k", type=int, default=0, help="sample among so many likeliest tokens; 0: all")
    generate.add_argument("--top-p", type=float, default=1.0, help="sample among the likeliest tokens of this probability")
    generate.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: avoid tokens that occurred")
    generate.add_argument("--seed", type=int, help="equal seeds sample equally")
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    generate.add_argument("--conversation", type=Path, metavar="chat.npz", help="go on with this conversation, and save it")
    both = argparse.BooleanOptionalAction
    generate.add_argument("--speculate", action=both, default=True, help="check drafts from the text so far")
    generate.add_argument("--draft", type=Path, metavar="small.flashmem", help="a small model whose drafts are checked")
    bundle(add("check", _check, "Read all of a bundle, weights too, and say whether it is what was written."))
    verify = add("verify", _verify, "Check what the driver makes of each kernel of a bundle.")
    bundle(verify)
    verify.add_argument("--device", metavar="NAME", help="a device, or 'auto'")
    verify.add_argument("--seconds", type=float, metavar="S", help="begin no check after S seconds")
    verify.add_argument("--again", action="store_true", help="check what an earlier check found right, too")
    replan = add("replan", _replan, "Plan a bundle again for another budget.", json=False)
    bundle(replan)
    replan.add_argument("--budget", required=True, metavar="SIZE", help="the new limit on all memory")
    replan.add_argument("-o", "--output", type=Path, metavar="other.flashmem", help="a new bundle that shares its weights")
    cache = add("cache", _cache, "List what is in the user's cache, or clear it.")
    cache.add_argument("action", nargs="?", choices=["clear"], help="remove kernels, and bundles that no session has open")
    profile = add("profile", _profile, "Measure a device with a kit, and print the path of the dataset.", json=False)
    profile.add_argument(
        "--measure", type=Path, required=True, metavar="x.kit", help="a kit that flashmem profile --kit wrote elsewhere"
    )
    profile.add_argument("-o", "--output", type=Path, default=Path(), metavar="DIR", help="folder for the dataset")
    profile.add_argument("--minutes", type=float, default=15.0, help="minutes to measure, over all resumed calls")
    profile.add_argument("--device", default="auto", metavar="NAME", help="a device, or 'auto'")
    profile.add_argument("--name", default="", help="name of the files")
    profile.add_argument("--fresh", action="store_true", help="start again instead of continuing a profile")
    return parser


def _doctor(arguments: argparse.Namespace) -> int:
    from flashmem.cli.commands.doctor import examine

    return 0 if examine(as_json=arguments.json) else 1


def _devices(arguments: argparse.Namespace) -> None:
    from flashmem.cli.commands.devices import show_devices

    show_devices(as_json=arguments.json)


def _run(arguments: argparse.Namespace) -> None:
    from flashmem.cli.commands.run import RunOptions, run_model

    shapes = read_variants(arguments.shape or ())
    compiling = Request(device=arguments.device, budget=arguments.budget, mode=arguments.mode, shapes=shapes)
    options = RunOptions(
        input=arguments.input,
        output=arguments.output,
        repeat=max(1, arguments.repeat),
        json=arguments.json,
        strategy=arguments.strategy,
        seed=arguments.seed,
        trace=arguments.trace,
        learn=arguments.learn,
        check_weights=arguments.check_weights,
        check_kernels=arguments.check_kernels,
        host_budget=arguments.host_budget,
        process_memory=arguments.process_memory,
    )
    run_model(arguments.bundle, compiling, options)


def _generate(arguments: argparse.Namespace) -> None:
    from flashmem.cli.commands.generate import GenerateOptions, generate_text

    compiling = Request(device=arguments.device, budget=arguments.budget, mode=arguments.mode)
    given = vars(arguments)
    options = GenerateOptions(**{each.name: given[each.name] for each in fields(GenerateOptions)})
    generate_text(arguments.bundle, arguments.prompt, compiling, replace(options, stop=tuple(arguments.stop)))


def _check(arguments: argparse.Namespace) -> None:
    from flashmem.cli.commands.bundles import check_bundle

    check_bundle(arguments.bundle, as_json=arguments.json)


def _verify(arguments: argparse.Namespace) -> int:
    from flashmem.cli.commands.verify import verify_bundle

    again, seconds = arguments.again, arguments.seconds
    right = verify_bundle(arguments.bundle, arguments.device, again=again, seconds=seconds, as_json=arguments.json)
    return 0 if right else 1


def _replan(arguments: argparse.Namespace) -> None:
    from flashmem.cli.commands.bundles import replan_bundle

    print(replan_bundle(arguments.bundle, arguments.budget, arguments.output))


def _cache(arguments: argparse.Namespace) -> None:
    from flashmem.cli.commands.bundles import clear_cache, list_cache

    if arguments.action == "clear":
        clear_cache()
    else:
        list_cache(as_json=arguments.json)


def _profile(arguments: argparse.Namespace) -> None:
    from flashmem.cli.commands.profile import measure_device

    print(
        measure_device(
            arguments.measure,
            arguments.device,
            arguments.output,
            minutes=arguments.minutes,
            name=arguments.name,
            resume=not arguments.fresh,
        )
    )
