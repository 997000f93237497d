"""Inputs of `flashmem run` that are a photo, a sound or a text: made in a child process, and the classes of the answer."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from flashmem.base.child_processes import module_environment, python_module
from flashmem.base.interrupts import EXIT_CODE, child_environment
from flashmem.bundle.language import is_bundle
from flashmem.cli.calls.file_inputs import FileInputs, ImageOptions
from flashmem.cli.calls.models import RunCommand
from flashmem.program.tensors import Port

if TYPE_CHECKING:
    from flashmem.tools.inputs.classes import Classes


@dataclass(frozen=True)
class MadeInputs:
    """The inputs that a child process made, in the .npz file `arrays`; a sentence for each kind of file; labels of the answer.

    `others` are inputs of the model that no file was given for. `labelled`: the user named the labels.
    """

    arrays: Path
    sentences: dict[str, str]
    others: tuple[str, ...]
    labels: dict[str, Any] = field(default_factory=dict)
    labelled: bool = False

    def check(self, outputs: Sequence[Port]) -> None:
        """Raise UserError if the user named labels, and no output has a number for each."""
        from flashmem.tools.inputs.classes import Labels, check_labels

        if self.labelled:
            check_labels(outputs, Labels(**self.labels))

    def classes(self, outputs: dict[str, NDArray[Any]]) -> Classes | None:
        """The likeliest classes, None if the outputs are not those of a classifier."""
        from flashmem.tools.inputs.classes import Labels, likeliest_classes

        return likeliest_classes(outputs, Labels(**self.labels))


@contextmanager
def made_inputs(call: RunCommand) -> Iterator[tuple[MadeInputs | None, RunCommand]]:
    """Make the inputs in a temporary folder; yields them, and `call` with the shapes of inputs with open dimensions.

    Yields None, and `call` unchanged, if no file was given.

    Raises:
        SystemExit: the child failed and has printed the reason; with its exit code.
        KeyboardInterrupt: the child was interrupted.
    """
    if not call.given.keys() & FileInputs.options.keys():
        yield None, call
        return
    variants = call.shapes
    with tempfile.TemporaryDirectory(prefix="flashmem-inputs-") as folder:
        arrays = Path(folder) / "inputs.npz"
        paths = {"image": call.image, "audio": call.audio, "labels": call.labels}
        request = {
            "model": str(call.model),
            "paths": {name: None if path is None else str(path) for name, path in paths.items()},
            "text": call.text,
            "rate": call.rate,
            "image_flags": call.given_as(ImageOptions).given,
            "shapes": variants[0] if len(variants) == 1 else {},
        }
        said = _child(request, arrays)
        shapes = said["shapes"]
        named = {name: tuple(shape) for name, shape in shapes.items() if name not in variants[0]}
        if named and not is_bundle(call.model):
            call = call.replace(shapes=[{**each, **named} for each in variants])
        labels = {"names": tuple(said["labels"]["names"]), "several": said["labels"]["several"]}
        others = tuple(name for name in said["others"] if name not in call.constants)
        yield MadeInputs(arrays, said["sentences"], others, labels, call.labels is not None), call


def _child(request: dict[str, Any], arrays: Path) -> dict[str, Any]:
    command = python_module("flashmem.tools.inputs", str(arrays))
    done = subprocess.run(
        command, input=json.dumps(request), stdout=subprocess.PIPE, text=True, check=False,
        env=module_environment(child_environment()),
    )  # fmt: skip
    if done.returncode == EXIT_CODE:
        raise KeyboardInterrupt
    if done.returncode:
        sys.exit(done.returncode if done.returncode > 0 else 1)  # negative: ended by a signal
    said: dict[str, Any] = json.loads(done.stdout)
    return said
