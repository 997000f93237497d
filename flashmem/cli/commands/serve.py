"""`flashmem serve`: a language model behind OpenAI's API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashmem.base.extras import need
from flashmem.base.streams import say
from flashmem.cli.commands.compiling import RUN_TIME, CompileOptions, open_bundle
from flashmem.runtime.generation.generator import Generator


def serve_model(model: Path, compiling: CompileOptions, host: str, port: int, name: str | None) -> None:
    """Serve a bundle or a GGUF file until the process is interrupted.

    Raises:
        UserError: a file or an option is invalid, or an extra is missing.
    """
    need("flashmem serve", "starlette", "uvicorn")
    from flashmem.tools.server.app import listening, serve

    with listening(host, port) as at:
        bundle = open_bundle(model, compiling, still_open=RUN_TIME, build=True)
        budget = compiling.budget if model.is_dir() else None  # a model compiled now has its budget in the bundle
        mode: Any = compiling.mode or "auto"
        with Generator(bundle, device=compiling.device or "auto", budget=budget, mode=mode) as generator:
            address, number = at.getsockname()[:2]
            shown = f"[{address}]" if ":" in address else address
            served = name or model.stem
            say(f"{served} is served at http://{shown}:{number}/v1")
            serve(generator, served, at)
