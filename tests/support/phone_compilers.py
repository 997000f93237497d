"""Whether the compilers of phones' GPUs are here (docs/research/phone-compilers.md)."""

import os

import pytest

from flashmem.profiler.phone_compilers import roots


def need_compilers(architecture: str) -> None:
    """Skip the test unless the compilers are set up. `.ci/run` says loudly where they could not be."""
    if os.environ.get("FLASHMEM_PHONE_COMPILERS") != "1" and roots.find_root(architecture) is None:
        pytest.skip("the compilers are not set up")
