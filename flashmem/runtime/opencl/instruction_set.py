"""The instruction set for which a CPU driver compiles kernels.

It is the processor's, unless the driver was built or set to compile for an older one. PoCL reports its LLVM processor at the
end of the device's version; for both runtimes an environment variable can name one.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Collection, Mapping

from flashmem.runtime.opencl.compile_target import driver_variables
from flashmem.runtime.opencl.cpuinfo import processors
from flashmem.target.instruction_set import INSTRUCTION_SETS

_ORDER = [name for name in INSTRUCTION_SETS if name != "neon"]
_NEEDED = {"avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}, "avx2": {"avx2", "fma"}, "avx": {"avx"}}
_VARIABLES = ("POCL_LLVM_CPU_NAME", "CL_CONFIG_CPU_TARGET_ARCH")
_LLVM_NAMES = {
    "sse": r"x86-64(-v2)?|core2|penryn|nehalem|westmere|silvermont|goldmont.*|tremont|corei7|btver1|amdfam10|barcelona|k8.*",
    "avx": r"sandybridge|ivybridge|corei7-avx|core-avx-i|btver2|bdver[123]",
    "avx2": r"haswell|broadwell|skylake|core-avx2|alderlake|raptorlake|meteorlake|x86-64-v3|bdver4|znver[123]",
}
"""Processors by which LLVM, PoCL and Intel's runtime name an instruction set below AVX-512."""


def instruction_set(platform_name: str, version: str, environment: Mapping[str, str] = os.environ) -> str:
    """The name of the instruction set in `INSTRUCTION_SETS` for which a CPU device's kernels are compiled; "" if unknown.

    `version` is the device's OpenCL version. What a variable names applies, if the processor has it.
    """
    machine = platform.machine().lower()
    if machine in ("aarch64", "arm64"):
        return "neon"
    if machine not in ("x86_64", "amd64"):
        return ""
    variables = driver_variables(platform_name, environment)
    forced = next((variables[name] for name in _VARIABLES if name in variables), "")
    reported = version.rsplit("-linux-gnu-", 1)[-1] if "-linux-gnu-" in version else ""
    sets = (_of_flags(_flags()), _of_processor(forced or reported))
    return min((each for each in sets if each), key=_ORDER.index)


def _flags() -> set[str]:
    """The extensions that all processors of this machine have; empty where the system does not list them."""
    lists = [set(each["flags"].split()) for each in processors() if "flags" in each]
    return set.intersection(*lists) if lists else set()


def _of_flags(flags: Collection[str]) -> str:
    """The widest instruction set with all its extensions in `flags`."""
    return next((name for name, needed in _NEEDED.items() if needed <= set(flags)), "sse")


def _of_processor(name: str) -> str:
    """The instruction set of a processor by its LLVM name; "" for others, which have AVX-512 or are not known."""
    return next((each for each, pattern in _LLVM_NAMES.items() if re.fullmatch(pattern, name.strip())), "")
