"""`flashmem compile --inspect`: what the open compiler of a phone's GPU makes of the kernels of a bundle."""

from __future__ import annotations

import sys

from flashmem.base.errors import UserError
from flashmem.bundle.bundle import Bundle
from flashmem.profiler.phone_compilers.gpus import GPUS, Gpu, gpu_of
from flashmem.profiler.phone_compilers.report import examine, texts_of
from flashmem.request.request import BundleRequest
from flashmem.target.descriptor import load_descriptor


def inspected_gpu(options: BundleRequest) -> Gpu:
    """The GPU that --device names.

    Raises:
        UserError: no device was named, or one without an open compiler.
    """
    if options.device == "auto":
        raise UserError(f"--inspect needs --device with a phone's GPU; name one of: {', '.join(GPUS)}")
    return gpu_of(load_descriptor(options.device).name)


def inspect_kernels(bundle: Bundle, gpu: Gpu) -> None:
    """Print the statistics of a bundle's kernels as a table; exit with 1 if a kernel does not compile."""
    report = examine(texts_of(bundle.path), gpu)
    print(report.table())
    if report.failures:
        sys.exit(1)
