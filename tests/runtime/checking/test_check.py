"""Checks of single launches on the CPU runtimes: right kernels, and kernels that a driver is imitated to miscompile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashmem.base.errors import RunError
from flashmem.runtime.checking.check import GUARD, check_kernel
from flashmem.runtime.checking.trial import Trial, TrialArgument, Verdict
from flashmem.runtime.kernels import verdicts
from flashmem.runtime.kernels.required import KernelLaunch, RequiredKernel
from flashmem.runtime.kernels.verdicts import UNOPTIMISED, Finding, Verdicts, text_key
from flashmem.runtime.opencl.context import CompiledProgram, Context, Queue
from flashmem.runtime.opencl.discovery import list_devices
from tests.support.miscompiled import KINDS, MiscompilingContext

OPTIONS = ("-cl-std=CL1.2",)
SCALED = """
__kernel __attribute__((reqd_work_group_size(16, 1, 1)))
void scaled(__global const float* restrict a, __global float* restrict y, const int columns, const float factor)
{
    __local float part[16];
    const int i = get_global_id(0), l = get_local_id(0);
    part[l] = i < columns ? a[i] : 0.0f;
    barrier(CLK_LOCAL_MEM_FENCE);
    float sum = 0.0f;
    for (int k = 0; k < 16; ++k) sum = mad(part[(l + k) % 16], factor, sum);
    if (i < columns) y[i] = exp(-fabs(sum)) + part[15 - l];
}
"""
ROUNDED = """
__kernel void rounded(__global const float* restrict a, __global half* restrict y, const int columns)
{
    const int i = get_global_id(0);
    if (i < columns) vstore_half_rte(a[i] * 1.01f, i, y);
}
"""
COPIED = """
__kernel void copied(__read_only image2d_t from, __write_only image2d_t to, const int columns)
{
    const int x = get_global_id(0), y = get_global_id(1);
    if (x < columns) write_imagef(to, (int2)(x, y), read_imagef(from, (int2)(x, y)));
}
"""


def checked(context: Context, trial: Trial) -> Verdict:
    """The verdict on a launch of the text as `context` compiles it."""
    unoptimised = (*OPTIONS, UNOPTIMISED)
    return check_kernel(context, trial, context.build(trial.text, OPTIONS), lambda: context.build(trial.text, unoptimised))


@pytest.fixture(params=list_devices(), ids=lambda device: device.descriptor_name)
def device(request: pytest.FixtureRequest) -> Any:
    return request.param


def scaled(columns: int = 40, text: str = SCALED, groups: int = 3) -> Trial:
    room = 4 * 16 * groups
    return Trial(
        "scaled", text, ((16 * groups,), (16,)),
        (
            TrialArgument("buffer", nbytes=room, writable=4 * columns, place="tensor a"),
            TrialArgument("buffer", nbytes=room, writable=4 * columns, place="tensor y"),
            TrialArgument("int", value=columns, place="n"), TrialArgument("float", value=0.25, place="f"),
        ),
    )  # fmt: skip


def rounded() -> Trial:
    arguments = (
        TrialArgument("buffer", nbytes=4 * 64, place="tensor a"),
        TrialArgument("buffer", nbytes=2 * 64, writable=2 * 60, place="tensor y"),
        TrialArgument("int", value=60, place="n"),
    )
    return Trial("rounded", ROUNDED, ((64,), (8,)), arguments)


def copied() -> Trial:
    image = TrialArgument("image", shape=(7, 5, "float"), place="slice a")
    other = TrialArgument("image", shape=(7, 5, "float"), place="slice b")
    return Trial("copied", COPIED, ((8, 5), (8, 1)), (image, other, TrialArgument("int", value=7, place="n")))


@pytest.mark.parametrize("trial", [scaled(), scaled(48), rounded()], ids=["tail", "whole", "halves"])
def test_right_kernels_are_right(device: Any, trial: Trial) -> None:
    verdict = checked(Context(device), trial)
    assert verdict.ok and not verdict.note and verdict.compared and not verdict.twin, "the interpreter executes all of it"


def test_what_the_interpreter_leaves_out_is_compared_with_the_twin(device: Any) -> None:
    trial = scaled(1000, groups=64)
    verdict = checked(Context(device), trial)
    assert verdict.ok and 0 < verdict.compared < 3000 and verdict.twin == 3 * 64 * 16


def test_textures(device: Any) -> None:
    if not device.has_images:
        pytest.skip("no textures")
    assert checked(Context(device), copied()).compared == 3 * 4 * 7 * 5
    wrong = MiscompilingContext(device, lambda text: text.replace("(int2)(x, y)))", "(int2)(min(x, 5), y)))"))
    assert "'to'" in checked(wrong, copied()).wrong


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("k < 16", "k < 15"),  # a step is lost
        ("(l + k) % 16", "(l ^ k) % 15"),  # a wrong place
        (", sum);", ", 0.5f * sum);"),
        ("exp(-fabs(sum))", "exp(-sum)"),
        ("if (i < columns) y[i]", "y[i]"),  # a tail's mask
        ("y[i] =", "y[i + 48] ="),  # behind the memory
        ("y[i] =", "y[i - 64] ="),  # before it
        ("i < columns ? a[i] : 0.0f", "a[i]"),  # slack is no zero
        ("part[15 - l];", "part[15 - l]; ((__global float*)a)[i] = 1.0f;"),  # what it only reads
    ],
)
def test_wrong_kernels_are_found(device: Any, old: str, new: str) -> None:
    assert old in SCALED
    assert not checked(MiscompilingContext(device, lambda text: text.replace(old, new)), scaled()).ok


def test_a_wrong_rounding_is_found(device: Any) -> None:
    assert not checked(MiscompilingContext(device, lambda text: text.replace("_rte", "_rtz")), rounded()).ok


class _Optimising(Context):
    """A context whose driver miscompiles one element, with optimisation only."""

    def build(self, source: str, options: Sequence[str]) -> CompiledProgram:
        return super().build(source if UNOPTIMISED in options else source.replace("k < 16", "k < 16 - (i == 500)"), options)


def test_a_wrong_element_that_the_interpreter_leaves_out_is_found(device: Any) -> None:
    assert (
        "1 of 1024 elements of 'y' differ from the unoptimised" in checked(_Optimising(device), scaled(1000, groups=64)).wrong
    )


class _Backwards(Context):
    """A context whose driver miscompiles without optimisation only."""

    def build(self, source: str, options: Sequence[str]) -> CompiledProgram:
        return super().build(source.replace("k < 16", "k < 15") if UNOPTIMISED in options else source, options)


def test_a_wrong_twin_is_no_fault_of_the_kernel(device: Any) -> None:
    verdict = checked(_Backwards(device), scaled(1000, groups=64))
    assert verdict.ok and verdict.compared and not verdict.twin and "unoptimised" in verdict.note


class _Racing(Context):
    """A context in which one launch of fifty changes a byte of the memory that was made last."""

    launches = 0

    def buffer(self, nbytes: int, **options: Any) -> Any:
        self.last = super().buffer(nbytes, **options)
        return self.last

    def queue(self, **options: Any) -> Queue:
        made, launch = super().queue(**options), Queue.launch

        def racing(*arguments: Any, **options: Any) -> Any:
            event = launch(made, *arguments, **options)
            self.launches += 1
            if self.launches % 50 == 30:
                made.write(self.last, np.array([77], np.uint8), offset=GUARD + 9)
            return event

        made.launch = racing  # type: ignore[method-assign]
        return made


def test_a_race_that_shows_seldom_is_found(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashmem.runtime.checking.check.REPEAT_SECONDS", 60.0)
    context = _Racing(device)
    assert "run 30 of the same launch" in checked(context, scaled()).wrong


def test_a_text_that_is_not_known_is_said(device: Any) -> None:
    text = SCALED.replace("exp(-fabs(sum))", "lgamma(sum)")
    verdict = checked(Context(device), scaled(text=text))
    assert verdict.ok and not verdict.compared and "lgamma" in verdict.note


def test_each_kind_of_imitation_has_a_place_somewhere() -> None:
    from flashmem.base.resources import read_text

    names = ("attention/attention", "contraction/matmul", "contraction/mac", "contraction/codes", "reduction/reduce_rows")
    text = "__kernel void k()\n{\n" + "\n".join(read_text("kernels", f"templates/{name}.cl.j2") for name in names)
    found = [kind.name for kind in KINDS if kind.sites(text)]
    assert len(found) > 10


def test_findings_are_kept_and_applied(device: Any, tmp_path: Path) -> None:
    text, options = scaled().text, OPTIONS
    kernel = RequiredKernel("scaled", text, (KernelLaunch(((48,), (16,)), ()),))
    key = text_key(device, text, options)
    Verdicts(device, tmp_path).keep({key: Finding(wrong="it is wrong", options=(UNOPTIMISED,), name="scaled")})
    known = Verdicts(device, tmp_path)
    assert known[key].wrong == "it is wrong" and list(known.wrong) == [key]
    assert known.applied([kernel], options)[0].options == (UNOPTIMISED,)
    assert known.applied([kernel], ("-cl-other",))[0].options == ()
    known.keep({key: Finding(wrong="it is wrong", name="scaled")})
    with pytest.raises(RunError, match="miscompiles the kernel scaled"):
        Verdicts(device, tmp_path).applied([kernel], options)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"kernels": {"a": {}}}', b'{"kernels": {"a": {"right": [1], "wrong": 2}}}']
)
def test_a_file_that_is_none_is_a_miss(device: Any, tmp_path: Path, content: bytes) -> None:
    Verdicts(device, tmp_path).keep({"a": Finding(wrong="b")})
    [file] = tmp_path.iterdir()
    file.write_bytes(content)
    verdicts._KNOWN.clear()
    assert not Verdicts(device, tmp_path).wrong
