"""What a language model will take, before anything large is read: a rehearsal with weights of zeros.

The model is planned as ever. Its bundle has no weights on the disk, and a session of it runs on the device within the budget.
So kernels, launches, loads and memory are those of the model. Weights are read from a hole in a file, which takes as long as
reading a file in the page cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from flashmem.base.errors import UserError
from flashmem.bundle.language import CANDIDATES, IDS, TEMPERATURE, TOTAL
from flashmem.compilation import read_compilation
from flashmem.compile import Progress, compile_rehearsal
from flashmem.request.request import BundleRequest
from flashmem.runtime.session import Session

_TOKENS = 8  # runs of which the median is taken


@dataclass(frozen=True)
class GenerationEstimate:
    """What generation with a model takes.

    Sizes in bytes: `smallest` budget, `weights` of its bundle, memory at most (`peak`), and weights that each later token loads
    (`token_bytes`). `prompt_seconds`: to read `prompt_tokens` of a prompt, the most that a run reads. `token_seconds`: for each
    later token. Both with `filled` tokens in the cache, which holds `max_length`, and with the weights in the page cache.
    """

    device: str
    max_length: int
    filled: int
    budget: int | None
    smallest: int
    weights: int
    peak: int
    token_bytes: int
    token_seconds: float
    prompt_tokens: int
    prompt_seconds: float


def estimate_generation(
    model: Path, request: BundleRequest, progress: Progress = lambda stage, fraction: None
) -> GenerationEstimate:
    """Estimate what generation with `model` takes.

    Raises:
        UserError: as `flashmem.compile`; the model is a bundle, or has no tokenizer.
        RunError: the device refuses.
    """
    compilation = read_compilation(model, request)
    if not compilation.is_language:
        raise UserError(f"{model} has no tokenizer; an estimate is of a .gguf file, or a folder of a language model")
    if compilation.request.batch > 1:
        raise UserError("an estimate is of one request at a time; leave out --batch")
    with TemporaryDirectory(prefix="flashmem-estimate-") as folder:
        bundle, smallest = compile_rehearsal(compilation, Path(folder) / "rehearsal.flashmem", progress)
        language = bundle.language()
        assert language is not None
        filled = min(256, language.max_length // 2)
        with Session(bundle, device=request.device) as session:

            def run(tokens: int) -> float:
                total = min(filled + tokens, language.max_length)
                given = {IDS: np.zeros((1, tokens), np.int64), TOTAL: np.array(total, np.int32)}
                session.run([CANDIDATES], {**given, TEMPERATURE: np.array(1, np.float32)})
                assert session.last_run is not None
                return session.last_run.latency.exec

            prompt_tokens = max(port.shape[1] for each in bundle.variants for port in each.program.inputs if port.name == IDS)
            prompt_seconds = min(run(prompt_tokens) for _ in range(2))
            token_seconds = median([run(1) for _ in range(1 + _TOKENS)][1:])
            last = session.last_run
            assert last is not None
            return GenerationEstimate(
                device=session.device.name,
                max_length=language.max_length,
                filled=filled,
                budget=last.memory.budget_bytes,
                smallest=smallest,
                weights=bundle.program.weights_bytes,
                peak=last.memory.peak_bytes,
                token_bytes=sum(load.nbytes for load in last.loads),
                token_seconds=token_seconds,
                prompt_tokens=prompt_tokens,
                prompt_seconds=prompt_seconds,
            )
