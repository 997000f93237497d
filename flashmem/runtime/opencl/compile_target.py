"""The compile target of a driver: the processor's instruction set, and environment variables that change compiled code.

Two processors can have the same device name in a CPU runtime, and one cannot run the other's code. Variables can force an
instruction set too (`CL_CONFIG_CPU_TARGET_ARCH`, `POCL_LLVM_CPU_NAME`). So all variables of a driver are part of the target,
except those known not to change code. Drivers read most of them once, at their start.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

from flashmem.runtime.opencl.cpuinfo import processors
from flashmem.runtime.opencl.icd import pip_runtimes

_PREFIXES = {"portable computing language": ("POCL_",), "intel": ("CL_CONFIG_", "VOLCANO_", "IGC_")}
_HARMLESS = frozenset(
    {
        "POCL_AFFINITY", "POCL_CACHE_DIR", "POCL_DEBUG", "POCL_DEVICES", "POCL_LEAVE_KERNEL_COMPILER_TEMP_FILES",
        "POCL_MAX_PTHREAD_COUNT", "POCL_MEMORY_LIMIT", "POCL_SIGFPE_HANDLER", "POCL_SIGUSR2_HANDLER", "POCL_STARTUP_DELAY",
        "POCL_TRACING", "POCL_TRACING_FILTER", "POCL_TRACING_OPT", "CL_CONFIG_CPU_TBB_NUM_WORKERS", "CL_CONFIG_LOG_FILE",
        "CL_CONFIG_CPU_FORCE_GLOBAL_MEM_SIZE", "CL_CONFIG_USER_LOGGER", "CL_CONFIG_USE_ITT_API",
    }
)  # fmt: skip
_FEATURES = ("flags", "Features", "isa", "features")
"""Lines of /proc/cpuinfo with a processor's instruction set extensions: x86, Arm, RISC-V, z."""
_CONFIGURATION = "cl.cfg"
"""A file next to Intel's runtime that sets its variables for all processes."""


def compile_target(platform_name: str, kind: str, environment: Mapping[str, str] = os.environ) -> str:
    """The compile target beyond the names and versions of a device, one property a line."""
    lines = [f"{name}={value}" for name, value in sorted(driver_variables(platform_name, environment).items())]
    if kind == "cpu":
        lines.append(_instruction_set())
        if "intel" in platform_name.lower():
            lines += _read_settings(pip_runtimes())
    return "\n".join(lines)


def driver_variables(platform_name: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables of a platform's driver that may change compiled code."""
    prefixes = next((prefix for name, prefix in _PREFIXES.items() if name in platform_name.lower()), tuple[str, ...]())
    return {name: value for name, value in environment.items() if name.startswith(prefixes) and name not in _HARMLESS}


def _instruction_set() -> str:
    """The processor's architecture and a hash of its instruction set extensions, over all different processors of the
    machine.
    """
    found = {" ".join(sorted(each[name].split())) for each in processors() for name in _FEATURES if name in each}
    features = "\n".join(sorted(found)) or platform.processor()
    return f"{platform.machine()} {hashlib.sha256(features.encode()).hexdigest()[:16]}"


def _read_settings(runtimes: Iterable[Path]) -> list[str]:
    """The settings in the configuration files beside `runtimes`."""
    found: list[str] = []
    for runtime in runtimes:
        try:
            text = runtime.with_name(_CONFIGURATION).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        found += [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return found
