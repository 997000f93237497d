"""The instruction set of a CPU driver's kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashmem.runtime.opencl import instruction_set as module
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.opencl.instruction_set import instruction_set

POCL, INTEL = "Portable Computing Language", "Intel(R) OpenCL"
AVX512 = "fma avx avx2 avx512f avx512bw avx512dq avx512vl avx512cd"
ON_HASWELL = "OpenCL 3.0 PoCL HSTR: pthread-x86_64-pc-linux-gnu-haswell"
ON_SKYLAKE = "OpenCL 3.0 PoCL HSTR: pthread-x86_64-pc-linux-gnu-skylake-avx512"


@pytest.mark.parametrize(
    ("flags", "platform", "version", "forced", "expected"),
    [
        (AVX512, POCL, ON_SKYLAKE, {}, "avx512"),
        (AVX512, POCL, ON_HASWELL, {}, "avx2"),  # built without AVX-512
        (AVX512, POCL, ON_SKYLAKE, {"POCL_LLVM_CPU_NAME": "ivybridge"}, "avx"),
        (AVX512, POCL, ON_SKYLAKE, {"CL_CONFIG_CPU_TARGET_ARCH": "core-avx2"}, "avx512"),  # another runtime's variable
        (AVX512, INTEL, "OpenCL 3.1 (Build 0)", {}, "avx512"),
        (AVX512, INTEL, "OpenCL 3.1 (Build 0)", {"CL_CONFIG_CPU_TARGET_ARCH": "core-avx2"}, "avx2"),
        (AVX512, INTEL, "OpenCL 3.1 (Build 0)", {"CL_CONFIG_CPU_TARGET_ARCH": "corei7"}, "sse"),
        ("fma avx avx2", INTEL, "OpenCL 3.1 (Build 0)", {}, "avx2"),
        ("fma avx avx2", POCL, ON_SKYLAKE, {}, "avx2"),  # the processor has no more
        ("avx avx2", POCL, ON_HASWELL, {}, "avx"),  # multiply-adds belong to avx2
        ("sse2", POCL, "OpenCL 3.0 PoCL HSTR: pthread-x86_64-pc-linux-gnu-x86-64", {}, "sse"),
        ("avx512f avx avx2 fma", POCL, "OpenCL 3.0 PoCL HSTR: pthread-x86_64-pc-linux-gnu-knl", {}, "avx2"),
    ],
)
def test_the_narrowest_of_processor_and_driver(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: str,
    platform: str,
    version: str,
    forced: dict[str, str],
    expected: str,
) -> None:
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr("flashmem.runtime.opencl.cpuinfo.CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: {flags} more\n")
    assert instruction_set(platform, version, forced) == expected


@pytest.mark.parametrize(("machine", "expected"), [("aarch64", "neon"), ("arm64", "neon"), ("riscv64", "")])
def test_other_architectures(monkeypatch: pytest.MonkeyPatch, machine: str, expected: str) -> None:
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    assert instruction_set(POCL, "OpenCL 3.0 PoCL", {}) == expected


@pytest.mark.skipif(module.platform.machine() != "x86_64", reason="the variable names a processor of x86-64")
def test_a_forced_instruction_set_is_that_of_the_descriptor() -> None:
    """In a process of its own, because drivers read their variables once."""
    code = (
        "from flashmem.runtime.opencl.discovery import list_devices\n"
        "from flashmem.runtime.opencl.devices import descriptor_for\n"
        "for each in list_devices():\n"
        "    print(each.descriptor_name, each.instruction_set, descriptor_for(each).tile.rows)\n"
    )
    forced = {"POCL_LLVM_CPU_NAME": "nehalem", "CL_CONFIG_CPU_TARGET_ARCH": "corei7"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **forced}, check=True, capture_output=True, text=True, timeout=120
    )
    found = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    for device in list_devices():
        if device.descriptor_name in ("pocl", "intel-cpu"):
            assert found[device.descriptor_name] == ["sse", "2"]
