"""A child that works on kernels with a driver that is imitated to miscompile fabs(), if it optimises; and all sums of the
kernel that a variable names; and every chain, if another one is set.
"""

from __future__ import annotations

import os
from typing import Any

from flashmem.runtime.kernels import worker
from flashmem.runtime.kernels.verdicts import UNOPTIMISED
from flashmem.runtime.opencl.context import Context

KERNEL = "FLASHMEM_TEST_MISCOMPILED"

CHAINS = "FLASHMEM_TEST_MISCOMPILED_CHAINS"

_build = Context.build


def build(context: Context, source: str, options: Any) -> Any:
    """In place of `Context.build`."""
    if KERNEL in os.environ and os.environ[KERNEL] in source:
        source = source.replace("fma(", "-fma(")
    if CHAINS in os.environ and "chain_x" in source:
        source = source.replace("chain_x : ", "chain_x / 2 * 2 : ")  # every other work-item does the work of its neighbour
    return _build(context, source if UNOPTIMISED in options else source.replace("fabs(", "-fabs("), options)


if __name__ == "__main__":
    Context.build = build  # type: ignore[method-assign]
    worker.main()
