"""`flashmem generate --estimate`: what a language model will take, before its weights are read."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from flashmem.base.errors import UserError
from flashmem.base.extras import offline_half
from flashmem.base.units import format_size
from flashmem.bundle.language import is_bundle
from flashmem.cli.output.console import emit_json, print_facts, progress
from flashmem.request.request import BundleRequest


def show_estimate(model: Path, compiling: BundleRequest, *, as_json: bool) -> None:
    """Print what generation with a GGUF file or a folder takes on the device, within the budget.

    Raises:
        UserError: `model` is a bundle or no language model, or an option is invalid.
        RunError: the device refuses.
    """
    if is_bundle(model):
        raise UserError(f"{model} is compiled already; --estimate is for a .gguf file or a folder of a language model")
    with offline_half("an estimate"):
        from flashmem.tools.estimate import estimate_generation
    with progress(f"planning {model.name}") as report:
        made = estimate_generation(model, compiling, report)
    if as_json:
        emit_json(asdict(made))
        return
    budget = "no budget" if made.budget is None else f"a budget of {format_size(made.budget)}"
    loaded = f"{format_size(made.token_bytes)} of them loaded for each token" if made.token_bytes else "all stay in memory"
    print_facts(
        {
            "device": made.device,
            "memory": f"{format_size(made.peak)} at most, with {budget}; the smallest budget is {format_size(made.smallest)}",
            "weights": f"{format_size(made.weights)}, {loaded}",
            "speed": f"{1 / made.token_seconds:.1f} tokens a second, {made.prompt_tokens} tokens of a prompt in "
            f"{made.prompt_seconds:.2f} s: with {made.filled} of {made.max_length} tokens in the cache, and the weights in the "
            f"page cache or in memory",
        }
    )
