"""`flashmem serve`: a language model behind OpenAI's API."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from flashmem.base.extras import need
from flashmem.base.streams import say
from flashmem.bundle.language import is_bundle
from flashmem.cli.commands.compiling import RUN_TIME, CompileOptions, open_bundle
from flashmem.cli.commands.generate import open_generator
from flashmem.runtime.generation.batch import BatchGenerator
from flashmem.runtime.generation.generator import Generator
from flashmem.runtime.generation.language_session import language_of, rows_in


def serve_model(
    model: Path, compiling: CompileOptions, host: str, port: int, name: str | None, host_budget: str | None = None
) -> None:
    """Serve a bundle or a GGUF file until the process is interrupted.

    Raises:
        UserError: a file or an option is invalid, or an extra is missing.
    """
    need("flashmem serve", "starlette", "uvicorn")
    from flashmem.tools.server.app import listening, serve

    with listening(host, port) as at, _opened(model, compiling, host_budget) as generator:
        address, number = at.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        served = name or model.stem
        say(f"{served} is served at http://{shown}:{number}/v1")
        serve(generator, served, at)


def _opened(model: Path, compiling: CompileOptions, host_budget: str | None) -> Generator | BatchGenerator:
    """A generator for one request at a time or for several, as the bundle or `compiling` says. Raises as `serve_model`."""
    bundle = open_bundle(model, compiling, still_open=RUN_TIME, build=True)
    language_of(bundle)
    if rows_in(bundle) == 1:
        return open_generator(model, compiling, host_budget=host_budget)
    device, mode = compiling.device or "auto", cast("Any", compiling.mode or "auto")
    budget = compiling.budget if is_bundle(model) else None  # a model compiled now has its budget in the bundle
    return BatchGenerator(bundle, device=device, budget=budget, host_budget=host_budget, mode=mode)
