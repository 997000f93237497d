"""The compilers of phones: parsing of their output, and the errors if they are missing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from flashmem.base.errors import UserError
from flashmem.profiler.phone_compilers import adreno, compiling, mali, packages, roots
from flashmem.profiler.phone_compilers.compiling import Compiled, Compiler, options_of, root_of
from flashmem.profiler.phone_compilers.gpus import GPUS, gpu_of
from flashmem.profiler.phone_compilers.report import CompilerReport, examine, texts_of
from flashmem.profiler.phone_compilers.statistics import LoopStatistics, bodies, main_loop
from flashmem.target.descriptor import descriptor_names
from tests.support.command_line import command_line
from tests.support.phone_compilers import need_compilers

DATA = Path(__file__).parent / "data"
BOTH = ("adreno750", "mali-g610")


def _recorded(gpu: str) -> Compiled:
    """The output of Mesa 26.1.6 for sum.cl, its last variant."""
    return Compiled((DATA / f"sum.{gpu}.txt").read_text())


def test_adreno_statistics() -> None:
    found = adreno.parse("sum", _recorded("adreno750"))
    assert found is not None
    assert (found.instructions, found.registers, found.spills, found.threads, found.loops) == (128, 28, 0, 16, 1)
    assert found.emulated == 0
    # Four mads of two components each; two scalars and a vector of four floats; 51 instructions, 19 slots of waiting.
    assert found.main_loop == LoopStatistics(51, 70, 8, 24, 3, 0, 0, 0, branches=2)
    assert found.main_loop.slots_per_mac == 70 / 8


def test_mali_statistics() -> None:
    found = mali.parse("sum", _recorded("mali-g610"))
    assert found is not None
    assert (found.instructions, found.registers, found.spills, found.threads, found.loops) == (88, 21, 0, 2, 1)
    assert found.main_loop == LoopStatistics(47, 47, 8, 24, 3, 0, 0, 0)


@pytest.mark.parametrize(
    ("line", "counted"),
    [
        ("(sy)(rpt3)mad.f16 hr2.x, hr4.w, (r)hr3.z, (r)(last)hr2.x", {"slots": 4, "macs": 4, "half_macs": 4}),
        ("(nop2) isam.s2en.mode0.base0 (f32)(xyzw)r3.x, r1.z, a1.x", {"slots": 3, "textures": 1}),
        ("(ss)(rpt2)nop", {"slots": 3}),
        ("ldp.u32 r1.x, p[r0.x], 4", {"slots": 1, "stack": 1}),
        ("stl.f32 l[r0.x+4], r1.x, 1", {"slots": 1, "local": 1}),
        ("ldg.u16 hr1.x, g[r4.x], 4", {"slots": 1, "loads": 1, "load_bytes": 8}),
        ("(ss)br !p0.y, #l788", {"slots": 1, "branches": 1}),
        ("ldg.a.u32 r1.x, g[c0.x+(r4.x)<<2], 2", {"slots": 1, "loads": 1, "load_bytes": 8}),
    ],
)
def test_instructions_of_adreno(line: str, counted: dict[str, int]) -> None:
    names = ("instructions", "slots", "macs", "load_bytes", "loads", "textures", "local", "stack")
    expected = {**dict.fromkeys(names, 0), "instructions": 1, **counted}
    assert adreno._counted(["l1:", line]) == LoopStatistics(**expected)


@pytest.mark.parametrize(
    ("line", "counted"),
    [
        ("        r8 = FMA.f32 r9, r15, r8^", {"macs": 1}),
        ("        r8 = FMA.v2f16 r9, r15, r8^", {"macs": 2}),
        ("        r0:r1 = LOAD.i64.flow1 r14^, r15^, byte_offset:0", {"loads": 1, "load_bytes": 8}),
        ("        r0 = LOAD.i32.tl.flow1 r14^, r15^, byte_offset:0", {"stack": 1}),
        ("        STORE.i32.tl.flow1 r0^, r14^, r15^, byte_offset:0", {"stack": 1}),
        ("        r0 = LOAD.i32.wls.flow1 r14^, r15^, byte_offset:0", {"local": 1}),
        ("        r0:r1:r2:r3 = TEX_FETCH.flow1.skip.f32.2d r0^, r1^", {"textures": 1}),
        ("        BRANCHZ.i16.flow10.eq u256, u256 -> block1", {}),
    ],
)
def test_instructions_of_mali(line: str, counted: dict[str, int]) -> None:
    names = ("instructions", "slots", "macs", "load_bytes", "loads", "textures", "local", "stack")
    expected = {**dict.fromkeys(names, 0), "instructions": 1, "slots": 1, **counted}
    assert mali._count([line, ""]) == LoopStatistics(**expected)


def test_a_loop_counts_without_the_loops_inside_it() -> None:
    assert bodies([(2, 9), (3, 5), (3, 7), (8, 8), (20, 21)]) == [[2, 9], [3, 4, 5, 6, 7], [8], [20, 21]]


def test_the_main_loop_has_the_most_multiply_adds_and_no_loop_inside() -> None:
    """Two loops in a loop in a loop, and a long one behind them; instruction 5 is the only multiply-add."""

    def counted(at: Sequence[int]) -> LoopStatistics:
        return LoopStatistics(len(at), 10 * len(at), int(5 in at), 0, 0, 0, 0, 0)

    main, around = main_loop(bodies([(0, 9), (2, 8), (3, 3), (5, 6), (20, 29)]), counted)
    assert (main, around) == (counted([5, 6]), counted([0, 1, 9, 2, 4, 7, 8]))
    assert main_loop(bodies([(3, 7)]), counted) == (counted(range(3, 8)), None)
    assert main_loop([], counted) == (None, None)


def test_nothing_printed_is_not_a_kernel() -> None:
    assert adreno.parse("sum", Compiled("no shader here")) is None
    assert mali.parse("sum", Compiled("no shader here")) is None


def test_descriptors_of_phones_have_a_compiler() -> None:
    phones = {name for name in descriptor_names() if name.startswith(("adreno", "mali"))}
    assert phones - {"adreno540"} == {name for gpu in GPUS.values() for name in gpu.descriptors}
    assert gpu_of("mali-g710").name == "mali-g610"
    with pytest.raises(UserError, match=r"no open compiler for 'nvidia'.*adreno750"):
        gpu_of("nvidia")


def test_kernels_with_shuffles_are_newer_opencl() -> None:
    assert options_of("FM_SHUFFLE(x, 1)") == ["-cl-std=CL3.0"]
    assert options_of("#pragma OPENCL EXTENSION cl_khr_integer_dot_product : enable") == ["-cl-std=CL3.0"]
    assert options_of("x") == ["-cl-std=CL1.2"]


def test_a_report_names_what_failed() -> None:
    found = adreno.parse("sum", _recorded("adreno750"))
    assert found is not None
    report = CompilerReport(GPUS["adreno750"], "26.1", (found,), {"other": "no\nsuch type"})
    assert report.to_dict()["kernels"][0]["main_loop"]["slots_per_mac"] == 8.75
    assert report.table().splitlines()[-2].split()[:3] == ["sum", "128", "28"]
    assert report.table().endswith("other: no such type")


@pytest.mark.parametrize(
    ("gpu", "missing", "said"),
    [
        ("adreno750", "apt-get", "apt-get is not installed"),
        ("adreno750", "unshare", "install util-linux"),
        ("mali-g610", "qemu-aarch64-static", "install qemu-user-static"),
    ],
)
def test_missing_programs_are_named(gpu: str, missing: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in {"apt-get", "dpkg-deb", "unshare", "qemu-aarch64-static"} - {missing}:
        (programs / name).write_text("#!/bin/sh\nexit 1\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=said):
        root_of(GPUS[gpu])


def test_a_download_that_fails_says_what_apt_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs, keys = tmp_path / "bin", tmp_path / "keys.gpg"
    programs.mkdir()
    keys.touch()
    for name, text in {"apt-get": "echo 'E: Could not resolve the archive' >&2; exit 100", "dpkg-deb": "exit 1"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(packages, "KEYRING", keys)
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="Could not resolve the archive"):
        roots.set_up("amd64")
    assert roots.find_root("amd64") is None
    assert [each.name for each in (tmp_path / "cache/phone-compilers").iterdir()] == []


def test_the_command_explains_what_is_wrong(tmp_path: Path) -> None:
    unknown, absent = ("nvidia", str(tmp_path)), ("adreno750", str(tmp_path / "x"))
    for words, said in ((unknown, "no open compiler"), (absent, "no such bundle")):
        done = subprocess.run(
            [sys.executable, "-m", "flashmem.profiler.phone_compilers", *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert said in done.stderr and "Traceback" not in done.stderr


def test_inspect_needs_a_phone(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = command_line(monkeypatch, capfd)
    for words, said in (((), "--inspect needs --device"), (("--device", "pocl"), "no open compiler for 'pocl'")):
        done = command("compile", tmp_path / "model.onnx", "--inspect", *words)
        assert (done.code, said in done.err) == (2, True)


def _answers(program: str, monkeypatch: pytest.MonkeyPatch, *texts: str, seconds: float = 60) -> list[Compiled]:
    """The answers of a compiler whose process is `program`, in Python."""
    monkeypatch.setattr(compiling, "_command", lambda *_: ([sys.executable, "-c", program], {}))
    with Compiler(GPUS["adreno750"], roots.Root(Path(), "amd64", "26.1.6"), seconds) as compiler:
        return [compiler.compile(text, ["-x"]) for text in texts]


def test_a_process_compiles_texts_until_one_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    program = """if True:
        import json, os, sys
        for count, line in enumerate(sys.stdin):
            asked = json.loads(line)
            print("code of", asked["text"], asked["options"], flush=True)
            if asked["text"] == "abort": os.abort()
            print("BUILT", json.dumps({"device": "a GPU", "seconds": count, "kernels": {"k": {"local_bytes": 4}}}), flush=True)
    """
    one, aborted, two, three = _answers(program, monkeypatch, "one", "abort", "two\nlines", "three")
    assert one == Compiled("code of one ['-x']\n", "", "a GPU", 0, {"k": {"local_bytes": 4}})
    assert aborted.error.endswith("without an answer: code of abort ['-x']") and not aborted.device
    assert [each.seconds for each in (two, three)] == [0, 1]  # of a second process


def test_a_process_that_hangs_or_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    [late] = _answers("import time; time.sleep(60)", monkeypatch, "text", seconds=0.2)
    assert late.error == "compiling took more than 0.2 s"
    with pytest.raises(UserError, match=r"cannot be entered .*unshare: no"):
        _answers("print('unshare: not permitted')", monkeypatch, "text")


@pytest.mark.parametrize("gpu", BOTH)
def test_a_kernel_is_compiled(gpu: str, tmp_path: Path) -> None:
    need_compilers(GPUS[gpu].architecture)
    file = tmp_path / "kernels.cl"
    file.write_text(f"//# sum\n{(DATA / 'sum.cl').read_text()}\n//# wrong\n__kernel void wrong() {{ missing(1); }}\n")
    fused = "__kernel void fused(__global float* x) { x[get_global_id(0)] = fma(x[1], x[2], x[3]); }"
    report = examine({**texts_of(file), "fused": fused}, GPUS[gpu], jobs=1)
    found, with_fma = report.kernels
    assert found.kernel == "sum" and found.main_loop is not None
    assert found.main_loop.macs % 8 == 0 and found.main_loop.stack == 0 == found.spills
    assert (found.emulated, with_fma.emulated) == (0, 2 if gpu == "adreno750" else 0)
    assert "missing" in report.failures["wrong"]
    assert json.loads(json.dumps(report.to_dict()))["mesa"].startswith(roots.MESA)
