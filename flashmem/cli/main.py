"""The command line: `flashmem doctor | compile | run | generate | queue | plan | check | replan | cache | profile | tune ...`.

`model_commands` and `device_commands` declare the commands, and `commands.options` the options that several of them share.
Before a command is chosen, typer is the heaviest import. `run` of a bundle imports the online half only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flashmem.base.interrupts import unwinding
from flashmem.base.streams import exit_codes, prepare_streams
from flashmem.base.version import __version__
from flashmem.cli import device_commands, model_commands


class _Commands(TyperGroup):
    """Typer group that reports the errors of commands with flashmem's own messages."""

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
cache = typer.Typer(help="List the user's cache, or clear it.", rich_markup_mode=None)
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


_COMMANDS: dict[str, Callable[..., None]] = {
    "devices": device_commands.devices,
    "doctor": device_commands.doctor,
    "compile": model_commands.compile_,
    "run": model_commands.run,
    "generate": model_commands.generate,
    "serve": model_commands.serve,
    "plan": model_commands.plan,
    "check": model_commands.check,
    "verify": model_commands.verify,
    "replan": model_commands.replan,
    "profile": device_commands.profile,
    "tune": device_commands.tune,
    "queue": model_commands.queue,
    "design": device_commands.design,
    "simulate": model_commands.simulate,
    "sweep": device_commands.sweep,
    "demo": model_commands.demo,
}
"""Functions of the commands, in the order of the help text."""
for _name, _command in _COMMANDS.items():
    app.command(_name)(_command)
cache.callback(invoke_without_command=True)(model_commands.cache_list)
cache.command("clear")(model_commands.cache_clear)
zoo.command("list")(device_commands.zoo_list)
zoo.command("export")(device_commands.zoo_export)


def main() -> None:
    """Run the command line in `sys.argv`; always raises SystemExit."""
    prepare_streams()
    with exit_codes():
        app()
