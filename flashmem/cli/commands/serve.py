"""`flashmem serve`: a language model behind OpenAI's API."""

from __future__ import annotations

from flashmem.base.extras import need
from flashmem.base.streams import say
from flashmem.cli.calls.models import ServeCommand
from flashmem.cli.commands.generate import open_language_model
from flashmem.runtime.generation.batch import BatchGenerator


def serve_model(call: ServeCommand) -> None:
    """Serve a bundle or a GGUF file until the process is interrupted.

    Raises:
        UserError: a file or an option is invalid, or an extra is missing.
    """
    need("flashmem serve", "starlette", "uvicorn")
    from flashmem.tools.server.app import listening, serve  # first: its memory counts in what the process holds

    with listening(call.host, call.port) as at:
        bundle, options = open_language_model(call.model, call)
        with BatchGenerator(bundle, **options) as generator:
            address, number = at.getsockname()[:2]
            shown = f"[{address}]" if ":" in address else address
            served = call.name or call.model.stem
            say(f"{served} is served at http://{shown}:{number}/v1")
            serve(generator, served, at)
