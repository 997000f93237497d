"""Export: the models of the zoo with random weights, written to ONNX the two ways PyTorch exports.

Nothing is downloaded: a model is built from its configuration and its weights are drawn from a seed. Stock initialisation
makes useless references (outputs that hardly depend on the input), so weights are drawn to keep activations near unit
variance: fan-in scaling for every matrix (He et al., ICCV 2015), query and key scaled down where attention is unscaled,
batch normalisation statistics taken from one pass. No bias or scale is left at 0 or 1, where a kernel that forgets
it would go unnoticed. Every export is checked: another input must move the output.
"""

from __future__ import annotations

import logging
import math
import tempfile
import warnings
from pathlib import Path
from typing import Any, Literal

from flashmem.errors import UserError
from flashmem.zoo.models import TOKEN_INPUT, ZooModel, find, zoo_module

Exporter = Literal["dynamo", "legacy"]

OUTPUT = "logits"

OPSET = 18
"""What both exporters write by themselves; `opset=` asks for another."""

_BRANCH_GAIN = 0.25
"""Of the last normalisation of ResNet's residual branches. Training starts it at 0 (Goyal et al., arXiv 1706.02677, section
5.1) and leaves it small; at 1, sixteen random blocks amplify a rounding of the weights to fp16 to 1-3 % of the output, in
PyTorch as anywhere, and the model could not tell a good kernel from a bad one."""


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
) -> Path:
    """Build `name` with weights drawn from `seed` and write `directory/filename`; returns that path.

    `size` is pixels a side or tokens (None: the model's own). `external_data` puts the weights into `filename.data`
    (None: only where the file would pass 1 GB or so); the legacy exporter decides this by itself. With `dynamic`, the
    batch, and the sequence of a language model, stay symbolic. Raises UserError for an unknown name or exporter, a size
    the architecture cannot take, or a missing `zoo` extra.
    """
    model = find(name)
    if exporter not in ("dynamo", "legacy"):
        raise UserError(f"no exporter {exporter!r}: choose dynamo or legacy")
    if exporter == "legacy" and external_data:
        raise UserError("the legacy exporter decides by itself where weights go: leave external_data out, or use dynamo")
    chosen = model.default_size if size is None else size
    if chosen < 1:
        raise UserError(f"the size of {name} is a positive number of {model.size_means}, not {chosen}")
    torch = zoo_module("torch")
    torch.manual_seed(seed)
    with torch.no_grad():
        network = model.build()
        first, second = (_example(torch, model, chosen) for _ in range(2))
        _initialise(torch, network, None if model.vocabulary else first)
        wrapped = _logits_only(torch, network.eval(), model.input_name)
        _check_that_input_matters(torch, wrapped, name, chosen, first, second)
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    if external_data is None:
        external_data = sum(p.numel() * p.element_size() for p in network.parameters()) > 10**9
    with tempfile.TemporaryDirectory(dir=target, prefix=".export-") as scratch:
        _write(torch, wrapped, first, model, Path(scratch) / filename, exporter, external_data, dynamic, opset)
        # The model last: what it refers to is then already in place.
        for file in sorted(Path(scratch).iterdir(), key=lambda path: path.name == filename):
            file.replace(target / file.name)
    return target / filename


def _example(torch: Any, model: ZooModel, size: int) -> Any:
    if model.vocabulary:
        return torch.randint(0, model.vocabulary, (1, size))
    # Smooth colour fields with grain: like a photograph, unlike white noise, no two have the same local averages.
    fields = torch.nn.functional.interpolate(torch.randn(1, 3, 4, 4), size=(size, size), mode="bilinear")
    return fields + 0.3 * torch.randn(1, 3, size, size)


def _initialise(torch: Any, network: Any, calibration: Any) -> None:
    """Draw every weight; with a `calibration` image, batch normalisation takes its statistics from images like it."""
    nn = torch.nn
    norms = (nn.LayerNorm, nn.BatchNorm2d)
    for path, module in network.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            fan_in = module.weight[0].numel()
            gain = math.sqrt(2.0) if isinstance(module, nn.Conv2d) else 1.0
            if path.endswith(("q_proj", "k_proj")):  # GPT-Neo does not scale its scores
                gain = (fan_in // network.config.num_heads) ** -0.25
            nn.init.normal_(module.weight, std=gain / math.sqrt(fan_in))
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.5)
        elif isinstance(module, norms):
            nn.init.normal_(module.weight, mean=1.0, std=0.1)
            if path.endswith("layer.2.normalization"):
                module.weight *= _BRANCH_GAIN
        if isinstance(getattr(module, "bias", None), nn.Parameter):  # GPT-Neo calls its causal mask `bias`
            nn.init.normal_(module.bias, std=0.1)
    for path, parameter in network.named_parameters():
        if path.endswith(("cls_token", "position_embeddings")):
            nn.init.normal_(parameter, std=0.5)
    if calibration is not None:
        _take_statistics(torch, network, calibration)


def _take_statistics(torch: Any, network: Any, calibration: Any) -> None:
    """Set normalisation statistics from variations of an image and from noise, and centre the classifier on their mean."""
    variations = calibration.roll(7, -1) * torch.linspace(0.5, 1.5, 4).reshape(4, 1, 1, 1) + torch.randn(4, 3, 1, 1)
    batch = torch.cat([variations, torch.randn(4, *calibration.shape[1:])])
    norms = [module for module in network.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    for module in norms:
        module.momentum = None  # None: the plain average of what is seen
        module.reset_running_stats()
    if norms:
        network.train()
        network(batch)
        network.eval()
    *_, classifier = (module for module in network.modules() if isinstance(module, torch.nn.Linear))
    classifier.bias -= network(batch).logits.mean(0)


def _logits_only(torch: Any, network: Any, input_name: str) -> Any:
    class Logits(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, tensor: Any) -> Any:
            extra = {"use_cache": False} if input_name == TOKEN_INPUT else {}
            return self.network(**{input_name: tensor}, **extra).logits

    return Logits().eval()


def _check_that_input_matters(torch: Any, network: Any, name: str, size: int, first: Any, second: Any) -> None:
    """Refuse a model whose answer does not depend on what it is asked: it would verify anything."""
    try:
        one, two = network(first), network(second)
    except (ValueError, RuntimeError, IndexError) as error:
        raise UserError(f"{name} cannot take size {size}: {error}") from error
    spread, moved = one.std().item(), (one - two).abs().max().item()
    if not (math.isfinite(spread) and moved > 0.1 * spread > 0):
        raise UserError(
            f"{name} at size {size} hardly depends on its input (moved {moved:g}, spread {spread:g}): try another size"
        )


def _write(
    torch: Any,
    network: Any,
    example: Any,
    model: ZooModel,
    path: Path,
    exporter: Exporter,
    external_data: bool,
    dynamic: bool,
    opset: int,
) -> None:
    zoo_module("onnxscript")
    symbolic = {0: "batch", 1: "sequence"} if model.vocabulary else {0: "batch"}
    how: dict[str, Any]
    if exporter == "dynamo":
        how = {"dynamo": True, "external_data": external_data, "verbose": False}
        if dynamic:
            how["dynamic_shapes"] = ({axis: torch.export.Dim.DYNAMIC for axis in symbolic},)
            example = torch.cat([example, example])  # a batch of one would be taken for a constant
    else:
        how = {"dynamo": False}
        if dynamic:
            how["dynamic_axes"] = {model.input_name: symbolic, OUTPUT: {0: "batch"}}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network, (example,), str(path), input_names=[model.input_name], output_names=[OUTPUT], opset_version=opset, **how
        )
