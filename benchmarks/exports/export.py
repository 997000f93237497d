"""Export of models with seeded weights to ONNX, with either exporter of PyTorch.

Nothing is downloaded: a model is built from its configuration, and its weights are drawn from a seed
(`benchmarks.exports.weights`). Every export is checked: changing any input must change an output, and every output must
change.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.exports.models import find
from benchmarks.exports.recipe import Recipe, exporter_module
from benchmarks.exports.weights import initialise
from flashmem.base.errors import UserError

Exporter = Literal["dynamo", "legacy"]

OPSET = 18
"""The operator set that both exporters write by default."""

INPUTS = "inputs.npz"
NOTES = "export.json"

_LEAST_MOVE = 0.1  # least change of an output, in its standard deviations, when one input changes
_TRIES = 16  # to draw a different value of an input with few values


def export(
    name: str,
    directory: str | Path,
    *,
    size: int | None = None,
    exporter: Exporter = "dynamo",
    external_data: bool | None = None,
    dynamic: bool = False,
    opset: int = OPSET,
    seed: int = 0,
    filename: str = "model.onnx",
    notes: bool = False,
) -> Path:
    """Build `name` with weights drawn from `seed`, write it to `directory/filename`, and return that path.

    `size` is in the unit of the model's `size_means` (None: the model's own). `external_data` writes the weights to
    `filename.data` (None: only if the file would exceed about 1 GB); the legacy exporter decides this itself. With `dynamic`,
    the batch and the sequence of a language model stay symbolic. `notes` adds `inputs.npz`, an example of every input, and
    `export.json`, a record of the export and its packages.

    Raises:
        UserError: an unknown name or exporter, or a missing package. Also an exporter that cannot write the model, or a
            size that the architecture does not support.
    """
    model = find(name)
    if exporter not in ("dynamo", "legacy"):
        raise UserError(f"no exporter {exporter!r}: choose dynamo or legacy")
    if exporter == "legacy" and external_data:
        raise UserError("the legacy exporter decides by itself where weights go: leave external_data out, or use dynamo")
    if exporter == "legacy" and model.dynamo_only:
        raise UserError(f"the legacy exporter cannot write {name}: {model.dynamo_only}; use dynamo")
    chosen = model.default_size if size is None else size
    if chosen < 1:
        raise UserError(f"the size of {name} is a positive number of {model.size_means}, not {chosen}")
    torch = exporter_module("torch")
    torch.manual_seed(seed)
    with torch.no_grad():
        network, first, second = _built(torch, model, chosen, seed)
        wrapped = _wrapped(torch, network, model)
        _check_that_inputs_matter(wrapped, model, chosen, first, second)
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    if external_data is None:
        external_data = sum(p.numel() * p.element_size() for p in network.parameters()) > 10**9
    with tempfile.TemporaryDirectory(dir=target, prefix=".export-") as scratch:
        _write(torch, wrapped, first, model, Path(scratch) / filename, exporter, external_data, dynamic, opset)
        if notes:
            np.savez(Path(scratch) / INPUTS, **{key: tensor.numpy() for key, tensor in first.items()})
            said = {"name": name, "size": chosen, "seed": seed, "exporter": exporter, "opset": opset, "versions": _versions()}
            (Path(scratch) / NOTES).write_text(json.dumps(said, indent=1) + "\n")
        # The model last, so that the files it refers to are in place.
        for file in sorted(Path(scratch).iterdir(), key=lambda path: path.name == filename):
            file.replace(target / file.name)
    return target / filename


def seeded_network(name: str, *, size: int | None = None, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """What `export` writes, in PyTorch: a module from inputs in order to a tuple of outputs, and its example by input name.

    Raises:
        UserError: an unknown name, a missing package, or a size that the architecture does not support.
    """
    model = find(name)
    torch = exporter_module("torch")
    torch.manual_seed(seed)
    with torch.no_grad():
        network, first, _ = _built(torch, model, model.default_size if size is None else size, seed)
    return _wrapped(torch, network, model), first


def _versions() -> dict[str, str]:
    """The versions of the packages that determine an export."""
    found = {}
    for package in ("torch", "transformers", "diffusers", "onnxscript"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # not installed, because the model does not need it
    return found


def _built(torch: Any, model: Recipe, size: int, seed: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The network with its weights in evaluation mode, and two examples of its inputs.

    Raises:
        UserError: the architecture does not support the size.
    """
    generator = np.random.default_rng(seed)
    try:
        network = model.build(size)
        first = _tensors(torch, model.examples(generator, size))
        initialise(torch, network)
        network.eval()
        if model.tune is not None:
            model.tune(torch, network, first)
    except (ValueError, RuntimeError, IndexError) as error:
        raise UserError(f"{model.name} cannot take size {size}: {error}") from error
    second = dict(first)
    for name in first:
        for _ in range(_TRIES):  # until the value differs
            second[name] = _tensors(torch, model.examples(generator, size))[name]
            if not torch.equal(first[name], second[name]):
                break
    return network, first, second


def _tensors(torch: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _wrapped(torch: Any, network: Any, model: Recipe) -> Any:
    """The network as a function from its inputs in order to its outputs in order."""
    names = [each.name for each in model.inputs]

    class Answer(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, *tensors: Any) -> tuple[Any, ...]:
            return model.answer(self.network, dict(zip(names, tensors, strict=True)))

    return Answer().eval()


def _check_that_inputs_matter(network: Any, model: Recipe, size: int, first: dict[str, Any], second: dict[str, Any]) -> None:
    """Refuse a model whose outputs do not depend on all inputs, because any engine would pass a comparison with it."""
    try:
        usual = network(*first.values())
        unmoved = set(model.outputs)
        for each in model.inputs:
            other = network(*(first | {each.name: second[each.name]}).values())
            moves = {}
            for output, one, two in zip(model.outputs, usual, other, strict=True):
                # A single score has no spread; its magnitude is used.
                spread = one.std().item() if one.numel() > 1 else one.abs().max().item()
                moved = (one - two).abs().max().item()
                moves[output] = f"{output} moved {moved:g}, spread {spread:g}"
                if math.isfinite(spread) and moved > _LEAST_MOVE * spread > 0:
                    unmoved.discard(output)
                    del moves[output]
            if len(moves) == len(model.outputs):
                raise UserError(
                    f"{model.name} at size {size} hardly depends on its input {each.name} ({'; '.join(moves.values())}): "
                    "try another size"
                )
    except (ValueError, RuntimeError, IndexError) as error:
        raise UserError(f"{model.name} cannot take size {size}: {error}") from error
    if unmoved:
        raise UserError(f"{model.name} at size {size}: output {min(unmoved)} hardly depends on any input; try another size")


def _write(
    torch: Any,
    network: Any,
    examples: dict[str, Any],
    model: Recipe,
    path: Path,
    exporter: Exporter,
    external_data: bool,
    dynamic: bool,
    opset: int,
) -> None:
    exporter_module("onnxscript")
    arguments = tuple(examples.values())
    how: dict[str, Any]
    if exporter == "dynamo":
        how = {"dynamo": True, "external_data": external_data, "verbose": False}
        if dynamic:
            open_axes = tuple({axis: torch.export.Dim.DYNAMIC for axis in each.symbolic} for each in model.inputs)
            how["dynamic_shapes"] = (open_axes,)
            arguments = tuple(torch.cat([each, each]) for each in arguments)  # the exporter treats a batch of one as constant
    else:
        how = {"dynamo": False}
        if dynamic:
            axes = {each.name: dict(each.symbolic) for each in model.inputs}
            how["dynamic_axes"] = axes | {name: {0: "batch"} for name in model.outputs}
    names = {"input_names": list(examples), "output_names": list(model.outputs)}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    torch._C._jit_onnx_log = lambda *words: None  # PyTorch leaves this log on, and prints the graph of a failed export
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.onnx.export(network, arguments, str(path), **names, opset_version=opset, **how)
        except OSError:
            raise
        except Exception as error:  # PyTorch has a class for each kind of failure
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            other = "dynamo" if exporter == "legacy" else "legacy"
            raise UserError(
                f"the {exporter} exporter of PyTorch {torch.__version__} cannot write {model.name} ({reason}); try {other}"
            ) from error
