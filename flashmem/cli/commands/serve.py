"""`flashmem serve`: a language model behind OpenAI's API."""

from __future__ import annotations

from pathlib import Path

from flashmem.base.extras import need
from flashmem.base.streams import say
from flashmem.cli.commands.compiling import CompileOptions
from flashmem.cli.commands.generate import open_generator


def serve_model(
    model: Path, compiling: CompileOptions, host: str, port: int, name: str | None, host_budget: str | None = None
) -> None:
    """Serve a bundle or a GGUF file until the process is interrupted.

    Raises:
        UserError: a file or an option is invalid, or an extra is missing.
    """
    need("flashmem serve", "starlette", "uvicorn")
    from flashmem.tools.server.app import listening, serve

    with listening(host, port) as at, open_generator(model, compiling, host_budget=host_budget) as generator:
        address, number = at.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        served = name or model.stem
        say(f"{served} is served at http://{shown}:{number}/v1")
        serve(generator, served, at)
