"""Arguments and exit codes common to all benchmarks: a wrong argument prints one sentence and exits with 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from flashmem.base.errors import UserError
from flashmem.base.streams import EXIT_USER_ERROR, exit_codes, prepare_streams, say
from flashmem.runtime.request.options import device_here


class Arguments(argparse.ArgumentParser):
    """The arguments of a benchmark; its module docstring is the description."""

    def __init__(self, text: str | None) -> None:
        module = sys.modules["__main__"].__spec__  # argparse would print `usage: NAME.py`
        prog = f"python -m {module.name}" if module else None
        super().__init__(prog=prog, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        """Print one sentence, without the usage, and exit with 2."""
        say(" ".join(message.split()))
        self.exit(EXIT_USER_ERROR)

    def add_zoo(self, *, required: bool = True) -> None:
        """`--zoo DIR`: an existing folder of exported models."""
        self.add_argument(
            "--zoo", type=_folder, required=required, metavar="DIR", help="models from `python -m benchmarks.exports`"
        )

    def add_device(self, default: str = "auto") -> None:
        """`--device NAME`, which `check_device` checks."""
        self.add_argument("--device", default=default, help="a local device (`flashmem devices`)")

    def add_language_model(self) -> None:
        """The file of a language model, by default model.gguf, and `--device`."""
        self.add_argument("model", type=Path, nargs="?", default=Path("model.gguf"), metavar="model.gguf")
        self.add_device()

    def check_device(self, name: str) -> None:
        """Exit unless the device is on this machine."""
        try:
            device_here(name)
        except UserError as error:
            self.error(str(error))

    def check_model(self, model: str) -> None:
        """Exit unless it is an .onnx file that exists, or a known architecture."""
        from flashmem.tools.zoo.graphs import check_architecture  # half a second, in processes that are measured too

        if not model.endswith(".onnx"):
            check_architecture(model)
        elif not Path(model).is_file():
            self.error(f"{model}: no such file")

    def models_in(self, zoo: Path, names: Sequence[str]) -> dict[str, Path]:
        """The files of `names` that exist in `zoo`, as NAME/model.onnx or NAME.onnx. Exits if none exists."""
        files = {name: (zoo / name / "model.onnx", zoo / f"{name}.onnx") for name in names}
        found = {name: file for name, both in files.items() for file in reversed(both) if file.is_file()}
        if not found:
            self.error(f"none of {', '.join(names)} is in {zoo}; export one with `python -m benchmarks.exports`")
        return found

    def all_models_in(self, zoo: Path, names: Sequence[str]) -> dict[str, Path]:
        """The files of `names` in `zoo`. Exits if one is missing."""
        found = self.models_in(zoo, names)
        if missing := [name for name in names if name not in found]:
            self.error(f"{', '.join(missing)} is not in {zoo}; export it with `python -m benchmarks.exports`")
        return found


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} is not a folder; name the one that `python -m benchmarks.exports` wrote models to"
        )
    return Path(text)


def run_command(main: Callable[[], None]) -> None:
    """Run a benchmark with the exit codes and error messages of `flashmem`."""
    prepare_streams()
    with exit_codes():
        main()
